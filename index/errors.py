"""Every error a caller can cause, as one family.

The class says which HTTP status and machine code it answers with; its docstring is the default message
(procrastinate's rule). `pointer` is the JSON pointer (RFC 6901) of the field at fault.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

OUT_OF_MEMORY = ("bad_alloc", "bad allocation", "Failed to allocate memory")
"""What libraries in C++ say when there is no memory left."""


class RegraftError(Exception):
    """The request could not be carried out."""

    status = 400
    code = "bad_request"

    def __init__(self, message: str | None = None, *, pointer: str = "") -> None:
        self.message = message or (self.__doc__ or "").strip().splitlines()[0]
        self.pointer = pointer
        super().__init__(self.message)


def raise_if_out_of_memory(error: Exception) -> None:
    """Raise MemoryError in the place of an error that only says so in words, as onnxruntime's does."""
    if isinstance(error, MemoryError) or any(words in str(error) for words in OUT_OF_MEMORY):
        raise MemoryError(str(error)) from error


class InvalidVersionFolder(RegraftError):
    """The version folder does not hold what its card promises."""

    status = 422
    code = "invalid_version_folder"


class ChangedOnDisk(InvalidVersionFolder):
    """A file of a version or an edge is no longer the one that was accepted."""

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


class InvalidText(RegraftError):
    """The text cannot be embedded."""

    status = 422
    code = "invalid_text"


class InvalidArgument(RegraftError):
    """An argument is outside its legal values."""

    status = 422
    code = "invalid_argument"


class InvalidFilter(RegraftError):
    """The metadata filter is not what docs/filters.md describes."""

    status = 422
    code = "invalid_filter"


class NoRoute(RegraftError):
    """No declared edge leads from the query's version to the stored items."""

    status = 409
    code = "no_route"


class NoEncoder(RegraftError):
    """The version has no encoder, so it takes embeddings and not images."""

    status = 409
    code = "no_encoder"


class DeviceUnavailable(RegraftError):
    """Models cannot run on the device that was chosen for them."""

    status = 503
    code = "device_unavailable"


class ModeUnavailable(RegraftError):
    """The items cannot be ranked together in the mode asked for."""

    status = 409
    code = "mode_unavailable"


class NoTextEntrance(RegraftError):
    """The version has no text entrance, so it does not embed texts."""

    status = 422
    code = "no_text_entrance"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: the known names most like it, "" if there are none."""
    near = difflib.get_close_matches(name, list(known), n=4, cutoff=0.5)
    return f"; near it: {', '.join(near)}" if near else ""
