"""Pack a version folder as a .zip, and unpack an untrusted one.

The unpacked size that the archive's central directory states is checked first; `zipfile` unpacks no more than that of a
file, in case the directory understates it.
"""

from __future__ import annotations

import io
import shutil
import stat
import zipfile
import zlib
from pathlib import Path, PurePosixPath

from index.errors import InvalidVersionFolder
from index.version import CARD, EDGE
from index.version_folder.artifacts import METHODS
from index.version_folder.checked_json import MAX_JSON_BYTES

MAX_FOLDER_BYTES = 4 << 30
MAX_FILES = 1000
MAX_DIRECTORY_BYTES = 1 << 20
"""Largest central directory of an archive, which is read at once."""
MAX_RATIO = 100
"""Largest ratio of unpacked to packed size; weights hardly compress."""
SMALL_BYTES = 64 << 20
"""Unpacked size up to which any ratio is legal."""
MAX_PATH = 200

UNREADABLE = (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError, RuntimeError, ValueError)


def pack_version(folder: Path, archive: Path) -> None:
    """Write a version folder as a .zip, card.json at its root."""
    # Files of reproducible builds are dated 1970; a .zip cannot store a year before 1980.
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as out:
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            out.write(path, path.relative_to(folder).as_posix())


def unpack_version(archive: Path, into: Path, needed: str = CARD) -> None:
    """Extract a .zip into the empty folder `into`; the file `needed` must lie at its root.

    Raises:
        InvalidVersionFolder: not such a .zip, a path outside the folder, a link, too many files or too many bytes.
        OSError: the files cannot be written.
    """
    with archive.open("rb", buffering=0) as stream, _Bounded(stream) as bounded:
        try:
            with zipfile.ZipFile(bounded) as packed:
                members = _checked(packed.infolist(), needed, archive.stat().st_size)
                for member in members:
                    _extract(packed, member, into)
        except UNREADABLE as error:
            raise InvalidVersionFolder(f"the archive is not a readable .zip ({error})") from error


def check_path(path: str) -> None:
    """Raise InvalidVersionFolder unless a path stays inside its folder and is legal on every system."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or "\\" in path or ":" in path or ".." in parts:
        raise InvalidVersionFolder(f"{path!r} would lie outside the version folder", pointer=f"/files/{path}")
    if not (path.isascii() and path.isprintable()) or len(path) > MAX_PATH or "/".join(parts) != path:
        why = f"must be at most {MAX_PATH} printable ASCII characters, without '.' or empty parts"
        raise InvalidVersionFolder(f"{path!r} {why}", pointer=f"/files/{path}")


class _Bounded(io.BufferedReader):
    """An archive with a limit on its central directory, which `zipfile` reads at once, whatever size it states."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0:
            return super().read(MAX_DIRECTORY_BYTES)
        if size > MAX_DIRECTORY_BYTES:
            raise InvalidVersionFolder(f"the archive lists more than {MAX_FILES} files")
        return super().read(size)

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        if whence == io.SEEK_SET and offset < 0:
            raise zipfile.BadZipFile("a file would lie before the beginning of the archive")
        return super().seek(offset, whence)


def _checked(listed: list[zipfile.ZipInfo], needed: str, packed_bytes: int) -> list[zipfile.ZipInfo]:
    """The files of an archive, checked by its directory. Raises InvalidVersionFolder."""
    if len(listed) > MAX_FILES:
        raise InvalidVersionFolder(f"the archive lists {len(listed)} files; at most {MAX_FILES} are legal")
    # Not `is_dir`, which fails on an empty name.
    members = [member for member in listed if not member.filename.endswith("/")]
    for member in members:
        _check_member(member)
    names = [member.filename for member in members]
    folders = {parent.as_posix() for name in names for parent in PurePosixPath(name).parents}
    if twice := next((name for name in names if names.count(name) > 1 or name in folders), None):
        raise InvalidVersionFolder(f"the archive is not a readable .zip ({twice} is repeated)", pointer=f"/{twice}")
    if needed not in names:
        raise InvalidVersionFolder(f"{needed} is missing at the root of the archive", pointer=f"/{needed}")
    total = sum(member.file_size for member in members)
    if total > MAX_FOLDER_BYTES:
        raise InvalidVersionFolder(f"the archive unpacks to more than {MAX_FOLDER_BYTES >> 30} GiB")
    if total > max(SMALL_BYTES, MAX_RATIO * packed_bytes):
        raise InvalidVersionFolder(f"the archive unpacks to more than {MAX_RATIO} times its size")
    return members


def _check_member(member: zipfile.ZipInfo) -> None:
    name = member.filename
    check_path(name)
    if stat.S_ISLNK(member.external_attr >> 16):
        raise InvalidVersionFolder(f"{name} is a link; only regular files are legal", pointer=f"/{name}")
    if member.compress_type not in METHODS:
        raise InvalidVersionFolder(f"{name} must be stored or deflated, no other compression", pointer=f"/{name}")
    if PurePosixPath(name).name in {CARD, EDGE} and member.file_size > MAX_JSON_BYTES:
        raise InvalidVersionFolder(f"{name} is larger than {MAX_JSON_BYTES} bytes", pointer=f"/{name}")


def _extract(packed: zipfile.ZipFile, member: zipfile.ZipInfo, into: Path) -> None:
    target = into.joinpath(*PurePosixPath(member.filename).parts)
    target.parent.mkdir(parents=True, exist_ok=True)
    with packed.open(member) as stream, target.open("xb") as out:
        shutil.copyfileobj(stream, out)
