"""All errors that a caller can cause, as subclasses of `RegraftError`.

Each class has its HTTP status and machine-readable code; its docstring is the default message. `pointer` is the JSON
pointer (RFC 6901) of the field at fault.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MAX_SHOWN = 256
"""Characters that a message shows of a name from a request: the longest legal id is shown whole."""
OUT_OF_MEMORY = ("bad_alloc", "bad allocation", "Failed to allocate memory")
"""Messages of C++ libraries that mean out of memory."""


class RegraftError(Exception):
    """The request could not be carried out."""

    status = 400
    code = "bad_request"

    def __init__(self, message: str | None = None, *, pointer: str = "") -> None:
        self.message = message or (self.__doc__ or "").strip().splitlines()[0]
        self.pointer = pointer
        super().__init__(self.message)


def raise_if_out_of_memory(error: Exception) -> None:
    """Raise MemoryError if only the message of an error says so, as in onnxruntime."""
    if isinstance(error, MemoryError) or any(words in str(error) for words in OUT_OF_MEMORY):
        raise MemoryError(str(error)) from error


class InvalidVersionFolder(RegraftError):
    """The version folder does not match its card."""

    status = 422
    code = "invalid_version_folder"


class ChangedOnDisk(InvalidVersionFolder):
    """A file of a version or an edge changed after it was accepted."""

    status = 500
    code = "changed_on_disk"


class InvalidVector(RegraftError):
    """The vector cannot be stored or searched."""

    status = 422
    code = "invalid_vector"


class InvalidImage(RegraftError):
    """The bytes are not an image that can be decoded."""

    status = 422
    code = "invalid_image"


class TooManyPixels(RegraftError):
    """The images of a request have more pixels in total than the service decodes for one: send fewer at a time."""

    status = 413
    code = "too_many_pixels"


class InvalidText(RegraftError):
    """The text cannot be embedded."""

    status = 422
    code = "invalid_text"


class InvalidArgument(RegraftError):
    """An argument is outside its legal values."""

    status = 422
    code = "invalid_argument"


class InvalidFilter(RegraftError):
    """The metadata filter is invalid: see docs/filters.md."""

    status = 422
    code = "invalid_filter"


class NoRoute(RegraftError):
    """No declared edge leads from the query's version to the stored items."""

    status = 409
    code = "no_route"


class NoEncoder(RegraftError):
    """The version has no encoder, so it accepts embeddings but no images."""

    status = 409
    code = "no_encoder"


class Unwritable(RegraftError):
    """A file or folder could not be written: the disk is full, or the place is not writable."""

    code = "unwritable"


class DeviceUnavailable(RegraftError):
    """Models cannot run on the configured device."""

    status = 503
    code = "device_unavailable"


class ModeUnavailable(RegraftError):
    """The items cannot be ranked together in the requested mode."""

    status = 409
    code = "mode_unavailable"


class NoTextEntrance(RegraftError):
    """The version has no text entrance, so it does not embed texts."""

    status = 422
    code = "no_text_entrance"


def shortened(name: str) -> str:
    """A name from a request as a message shows it: at most MAX_SHOWN characters, then an ellipsis."""
    return name if len(name) <= MAX_SHOWN else f"{name[:MAX_SHOWN]}..."


def pointer_to(*names: object) -> str:
    """The JSON pointer (RFC 6901) of names and numbers from a request, each as `shortened`."""
    parts = (shortened(str(name)).replace("~", "~0").replace("/", "~1") for name in names)
    return "".join(f"/{part}" for part in parts)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the most similar known names; "" if there are none."""
    near = difflib.get_close_matches(name, list(known), n=4, cutoff=0.5)
    return f"; did you mean {', '.join(near)}?" if near else ""
