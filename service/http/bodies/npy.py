"""Arrays in NumPy's own format (NEP 1), as bodies of requests: the header is matched, never evaluated; no pickle."""

from __future__ import annotations

import math
import re
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.errors import InvalidBody

NPY = "application/x-npy"
MAGIC = b"\x93NUMPY"
MAX_HEADER = 1024
"""Most bytes of a header; NumPy's header of a matrix has 118."""
_HEADER = re.compile(
    rb"\{'descr': '([<>]f[248])', 'fortran_order': (True|False), 'shape': \((\d{1,15}), (\d{1,15})\), ?\}[ \n]*"
)
_LABELS = re.compile(
    rb"\{'descr': '([<>|](?:b1|[iu][1248]|[SU][1-9]\d{0,3}))', 'fortran_order': (?:True|False), "
    rb"'shape': \((\d{1,15}),\), ?\}[ \n]*"
)


def read_npy(raw: bytes, pointer: str) -> NDArray[Any]:
    """The matrix (N, D) that `raw` holds, of float16, float32 or float64; nothing is copied.

    Raises:
        InvalidBody: it is not such an array, or the count of numbers differs from the header.
    """
    header, end = _header(raw, _HEADER, "a matrix (N, D) of float16, float32 or float64", pointer)
    numbers = _elements(raw, end, header[1], (int(header[3]), int(header[4])), pointer)
    return numbers.reshape((int(header[3]), int(header[4])), order="F" if header[2] == b"True" else "C")


def read_npy_labels(raw: bytes, pointer: str) -> NDArray[Any]:
    """The labels (N,) that `raw` holds, whole numbers or texts; nothing is copied.

    Raises:
        InvalidBody: it is not such an array, or the count of labels differs from the header.
    """
    header, end = _header(raw, _LABELS, "labels (N,) of integers or strings", pointer)
    labels = _elements(raw, end, header[1], (int(header[2]),), pointer)
    if labels.dtype.kind == "U" and (labels.view(labels.dtype.byteorder + "u4") > sys.maxunicode).any():
        raise InvalidBody("a label has a character that is none in Unicode", pointer=pointer)
    return labels


def _header(raw: bytes, legal: re.Pattern[bytes], needed: str, pointer: str) -> tuple[re.Match[bytes], int]:
    """The matched header, and where it ends."""
    long = raw[6:8] == b"\x02\x00"
    start = 12 if long else 10
    end = start + int.from_bytes(raw[8:start], "little")
    if not raw.startswith(MAGIC) or not (long or raw[6:8] == b"\x01\x00") or end - start > MAX_HEADER:
        raise InvalidBody("not an array in NumPy's format (.npy, version 1 or 2)", pointer=pointer)
    header = legal.fullmatch(raw[start:end])
    if header is None:
        raise InvalidBody(f"the array must be {needed}", pointer=pointer)
    return header, end


def _elements(raw: bytes, end: int, type_code: bytes, shape: tuple[int, ...], pointer: str) -> NDArray[Any]:
    """The elements after the header, as a 1-D array."""
    kind = np.dtype(type_code.decode())
    if math.prod(shape) * kind.itemsize != len(raw) - end:
        sizes = f"{math.prod(shape) * kind.itemsize} bytes, but {len(raw) - end} follow"
        raise InvalidBody(f"the array's header declares {sizes}", pointer=pointer)
    return np.frombuffer(raw, kind, offset=end)
