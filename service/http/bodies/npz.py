"""Pairs of embeddings in an archive of arrays (.npz), as `numpy.savez` and `numpy.savez_compressed` write them."""

from __future__ import annotations

import zlib
from typing import BinaryIO
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile

from index.evaluation.fitting import PairArrays
from service.errors import BodyTooLarge, InvalidBody
from service.http.bodies.npy import read_npy, read_npy_labels

NEEDED, KNOWN = ("new", "old"), ("new", "old", "labels")
POINTER = "/pairs"


def read_pairs(stream: BinaryIO, max_bytes: int) -> PairArrays:
    """The arrays `new`, `old` and, if present, `labels`.

    Args:
        stream: the file.
        max_bytes: most bytes of the unpacked arrays.

    Raises:
        InvalidBody: not an .npz, or an array is missing, unknown or of another type.
        BodyTooLarge: the arrays are larger than `max_bytes`.
    """
    arrays = _unpacked(stream, max_bytes)
    if missing := next((name for name in NEEDED if name not in arrays), None):
        raise InvalidBody(f"the pairs have no array {missing!r}", pointer=f"{POINTER}/{missing}")
    new, old = (read_npy(arrays[name], f"{POINTER}/{name}") for name in NEEDED)
    labels = read_npy_labels(arrays["labels"], f"{POINTER}/labels") if "labels" in arrays else None
    return PairArrays(new, old, labels)


def _unpacked(stream: BinaryIO, max_bytes: int) -> dict[str, bytes]:
    """The content of each array's file, by the array's name."""
    try:
        with ZipFile(stream) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            if unknown := next((name for name in members if name not in KNOWN), None):
                raise InvalidBody(f"unknown array {unknown!r}; legal: {', '.join(KNOWN)}", pointer=POINTER)
            # Other compression methods have no bound on the size of what is unpacked.
            if any(info.compress_type not in {ZIP_STORED, ZIP_DEFLATED} for info in members.values()):
                raise InvalidBody("the pairs must be uncompressed or compressed as NumPy does", pointer=POINTER)
            if (size := sum(info.file_size for info in members.values())) > max_bytes:
                raise BodyTooLarge(
                    f"the pairs have {size} bytes unpacked; at most {max_bytes} are legal", pointer=POINTER
                )
            return {name: archive.read(info) for name, info in members.items()}
    except (BadZipFile, zlib.error, EOFError, OSError, RuntimeError, ValueError) as error:
        raise InvalidBody(f"the pairs cannot be read as .npz: {error}", pointer=POINTER) from error
