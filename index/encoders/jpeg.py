"""The scans of a JPEG (`has_scans_beyond`): a decoder goes through all pixels for each of them, however short it is."""

from __future__ import annotations

import re

BEGINNING = b"\xff\xd8"
_SCAN, _END = 0xDA, 0xD9
_FIRST_SEGMENT = 0xC0
"""Markers from here on begin a segment that states its length, except `_END` and `BEGINNING`."""
_BARE = {_END, BEGINNING[1]}
# Inside a scan a byte 0xFF is followed by 0x00, or by a restart marker (0xD0 to 0xD7).
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")


def has_scans_beyond(data: bytes, most: int) -> bool:
    """Whether the first image of a JPEG file has more than `most` scans; reads no further than needed."""
    # A thumbnail, or a film behind the image, may hold the same two bytes: if there are many, the markers are followed.
    if data.count(bytes((0xFF, _SCAN))) <= most:
        return False
    scans, at = 0, len(BEGINNING)
    while (found := _MARKER.search(data, at)) is not None:
        marker, at = data[found.end() - 1], found.end()
        if marker == _END:
            return False
        scans += marker == _SCAN
        if scans > most:
            return True
        if marker >= _FIRST_SEGMENT and marker not in _BARE:
            at += int.from_bytes(data[at : at + 2])
    return False
