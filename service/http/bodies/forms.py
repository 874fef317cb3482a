"""Multipart bodies: files spooled to disk, fields checked by name."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException

from index.errors import pointer_to, shortened
from service.errors import BodyTooLarge, InvalidBody
from service.http.bodies.media_types import UnsupportedMediaType

MAX_FIELDS = 16

NO_SUCH_FILE = "image must be the file name of one of the form's files"
"""The error of an item or entry that names no file of its form."""


@dataclass(frozen=True)
class Form:
    """A parsed form: text fields by name, the files of its one file field, and an array in NumPy's format, if any."""

    fields: Mapping[str, str]
    files: Sequence[UploadFile]
    array: UploadFile | None = None

    def only_file(self, field: str, kind: str = "") -> UploadFile:
        """The file of a form that takes one; `kind`: its suffix. Raises InvalidBody if it is missing."""
        if not self.files:
            what = f"{kind} file".lstrip()
            raise InvalidBody(f"the form must have one {what} in the field {field!r}", pointer=f"/{field}")
        return self.files[0]

    def files_by_name(self) -> dict[str, UploadFile]:
        """The images, which items and entries name. Raises InvalidBody if two have the same name."""
        named = {file.filename or "": file for file in self.files}
        if len(named) < len(self.files):
            raise InvalidBody("two files of the form have the same name", pointer="/images")
        return named


@asynccontextmanager
async def read_form(
    request: Request, *, files: str, fields: set[str], max_files: int, max_field_bytes: int, array: str = ""
) -> AsyncIterator[Form]:
    """Parse a form with the file field `files` and the text fields `fields`; its files close with the context.

    `array`: a field that may hold one array instead of the files.

    Raises:
        InvalidBody: not a form, or a field is unknown, repeated or of the wrong type.
        BodyTooLarge: too many files, or a text field is too large.
        UnsupportedMediaType: it cannot be decoded by the charset in its header.
    """
    try:
        parsed = await request.form(max_files=max_files, max_fields=MAX_FIELDS, max_part_size=max_field_bytes)
    except HTTPException as error:
        if error.status_code != 400:
            raise
        if " exceeded maximum size of " in error.detail:  # Starlette does not say which
            raise BodyTooLarge(f"a text field of the form is larger than {max_field_bytes} bytes") from error
        kind = BodyTooLarge if error.detail.startswith("Too many files") else InvalidBody
        raise kind(f"the form cannot be read: {error.detail}", pointer=f"/{files}") from error
    except UnicodeError as error:  # raised for some charsets other than UTF-8
        header = request.headers["content-type"]
        raise UnsupportedMediaType(f"the form cannot be decoded as {header!r}: use UTF-8") from error
    try:
        yield _checked(parsed, files, fields, array)
    finally:
        await parsed.close()


def _checked(parsed: FormData, files: str, fields: set[str], array: str) -> Form:
    texts: dict[str, str] = {}
    uploads: list[UploadFile] = []
    arrays: list[UploadFile] = []
    for name, value in parsed.multi_items():
        if name == files and isinstance(value, UploadFile):
            uploads.append(value)
        elif name == array and isinstance(value, UploadFile) and not arrays:
            arrays.append(value)
        elif name in fields and isinstance(value, str) and name not in texts:
            texts[name] = value
        else:
            why = _why_refused(shortened(name), value, files, fields, array)
            raise InvalidBody(why, pointer=pointer_to(name))
    if uploads and arrays:
        raise InvalidBody(f"a form must have either {files} or {array}, not both", pointer=f"/{array}")
    return Form(texts, uploads, arrays[0] if arrays else None)


def _why_refused(name: str, value: Any, files: str, fields: set[str], array: str) -> str:
    if array and name == array:
        return f"field {name!r} must be one file in NumPy's format (.npy), with a file name"
    if name == files:
        return f"parts of field {name!r} must be files: give each a file name"
    if name not in fields:
        return f"unknown field {name!r}; legal: {', '.join(sorted({files, *fields, *({array} if array else ())}))}"
    return f"field {name!r} must be text, not a file" if isinstance(value, UploadFile) else f"{name!r} is given twice"
