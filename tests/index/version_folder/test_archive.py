"""index.version_folder.archive: an archive from a stranger never unpacks to more than its directory says."""

from __future__ import annotations

import os
import resource
import stat
import struct
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from index.errors import InvalidVersionFolder
from index.version import CARD, ENCODER, Card, Version
from index.version_folder import archive as archives
from index.version_folder.archive import pack_version, unpack_version
from index.version_folder.folder import load_version, write_card


def test_a_version_travels_as_a_zip(make_version: Callable[..., Version], tmp_path: Path) -> None:
    old = make_version(tmp_path / "v1", "v1", 4)
    new = make_version(tmp_path / "v2", "v2", 6, edges=[(old, "matrix")])
    pack_version(new.folder, tmp_path / "v2.zip")
    unpack_version(tmp_path / "v2.zip", tmp_path / "unpacked")
    assert load_version(tmp_path / "unpacked").card == new.card


def test_files_dated_before_zip_knows_a_year_travel(make_version: Callable[..., Version], tmp_path: Path) -> None:
    made = make_version(tmp_path / "v1", "v1", 4)
    os.utime(made.folder / CARD, (0, 0))
    pack_version(made.folder, tmp_path / "v1.zip")
    unpack_version(tmp_path / "v1.zip", tmp_path / "unpacked")
    assert load_version(tmp_path / "unpacked").card == made.card


def zipped(path: Path, *members: tuple[str | zipfile.ZipInfo, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out:
        for name, content in members:
            out.writestr(name, content)
    return path


def tree(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "a/../../evil", "..", "a\\..\\..\\evil", "C:evil", "x" * 300])
def test_a_zip_with_a_path_that_escapes_is_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    archive = zipped(tmp_path / "bad.zip", (CARD, b"{}"), (name, b"evil"))
    before = tree(tmp_path)
    with pytest.raises(InvalidVersionFolder, match=r"outside the version folder|at most 200"):
        unpack_version(archive, tmp_path / "inner" / "unpacked")
    assert tree(tmp_path) == before


def test_a_zip_with_a_file_without_a_name_is_refused(tmp_path: Path) -> None:
    archive = zipped(tmp_path / "bad.zip", (CARD, b"{}"), ("nameless", b"x"))
    archive.write_bytes(archive.read_bytes().replace(b"nameless", bytes(8)))  # a name ends at the first zero

    with pytest.raises(InvalidVersionFolder, match="'' would lie outside"):
        unpack_version(archive, tmp_path / "unpacked")


def test_a_zip_with_a_link_is_refused(tmp_path: Path) -> None:
    link = zipfile.ZipInfo("encoder.onnx")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with pytest.raises(InvalidVersionFolder, match=r"encoder\.onnx is a link"):
        unpack_version(zipped(tmp_path / "bad.zip", (link, b"/etc/passwd")), tmp_path / "unpacked")


def test_a_zip_that_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MAX_FOLDER_BYTES", 1 << 20)
    archive = zipped(tmp_path / "bomb.zip", (CARD, b"{}"), ("zeros", bytes(2 << 20)))
    assert archive.stat().st_size < 10_000
    with pytest.raises(InvalidVersionFolder, match="unpacks to more than"):
        unpack_version(archive, tmp_path / "unpacked")
    assert not (tmp_path / "unpacked").exists()


def test_no_more_of_a_file_is_unpacked_than_the_directory_states(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bad.zip", "w") as out:
        out.writestr(CARD, b"{}")
        out.writestr("zeros", bytes(1 << 20), zipfile.ZIP_DEFLATED)
        out.getinfo("zeros").file_size, out.getinfo("zeros").CRC = 5, zlib.crc32(bytes(5))

    unpack_version(tmp_path / "bad.zip", tmp_path / "unpacked")

    assert (tmp_path / "unpacked" / "zeros").read_bytes() == bytes(5)


def test_a_zip_whose_members_collide_is_refused(tmp_path: Path) -> None:
    archive = zipped(tmp_path / "bad.zip", (CARD, b"{}"), ("a", b"file"), ("a/b", b"below it"))
    with pytest.raises(InvalidVersionFolder, match=r"not a readable \.zip"):
        unpack_version(archive, tmp_path / "unpacked")


@pytest.mark.parametrize("content", [b"", b"PK\x05\x06", b"not a zip at all"])
def test_bytes_that_are_no_zip_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.zip").write_bytes(content)
    with pytest.raises(InvalidVersionFolder, match=r"not a readable \.zip"):
        unpack_version(tmp_path / "bad.zip", tmp_path / "unpacked")


@settings(max_examples=150, deadline=None)
@given(flips=st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 255)), min_size=1, max_size=4))
def test_a_damaged_zip_is_refused_or_caught_by_its_hashes(
    tmp_path_factory: pytest.TempPathFactory, flips: list[tuple[int, int]]
) -> None:
    place = tmp_path_factory.mktemp("flip")
    (place / "v").mkdir()
    (place / "v" / "notes.txt").write_text("every byte counts " * 20)
    write_card(place / "v", Card("v", 3, {"kind": "cosine"}))
    pack_version(place / "v", place / "v.zip")
    content = bytearray((place / "v.zip").read_bytes())
    for at, value in flips:
        content[at % len(content)] ^= value
    (place / "v.zip").write_bytes(bytes(content))
    try:
        unpack_version(place / "v.zip", place / "unpacked")
        loaded = load_version(place / "unpacked")
    except InvalidVersionFolder:
        return
    assert loaded.card == load_version(place / "v").card  # the flips hit only dates or padding


def described(name: str, content: bytes = b"", **fields: int) -> tuple[zipfile.ZipInfo, bytes]:
    member = zipfile.ZipInfo(name)
    member.compress_type = fields.get("method", zipfile.ZIP_DEFLATED)
    return member, content


CARD_MEMBER = (CARD, b"{}")


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([(ENCODER, b"x")], r"card\.json is missing at the root"),
        ([CARD_MEMBER, *((f"{n}", b"") for n in range(1000))], "lists 1001 files; at most 1000"),
        ([(CARD, bytes(2 << 20))], r"card\.json is larger than"),
        ([CARD_MEMBER, ("edges/v1/edge.json", bytes(2 << 20))], r"edge\.json is larger than"),
        ([CARD_MEMBER, ("zeros", bytes(65 << 20))], "more than 100 times its size"),
        ([CARD_MEMBER, described(ENCODER, b"x", method=zipfile.ZIP_LZMA)], "must be stored or deflated"),
        ([CARD_MEMBER, described(ENCODER, b"x", method=zipfile.ZIP_BZIP2)], "must be stored or deflated"),
        ([CARD_MEMBER, ("a//b", b"")], "empty parts"),
        ([CARD_MEMBER, ("./a", b"")], "empty parts"),
    ],
    ids=["no card", "files", "card", "edge", "ratio", "lzma", "bzip2", "empty part", "dot"],
)
def test_a_bomb_is_refused_before_anything_is_written(
    tmp_path: Path, members: list[tuple[str | zipfile.ZipInfo, bytes]], message: str
) -> None:
    archive = zipped(tmp_path / "bomb.zip", *members)
    with pytest.raises(InvalidVersionFolder, match=message):
        unpack_version(archive, tmp_path / "unpacked")
    assert not (tmp_path / "unpacked").exists()


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_file_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidVersionFolder, match=r"card\.json is repeated"):
        unpack_version(zipped(tmp_path / "two.zip", CARD_MEMBER, CARD_MEMBER), tmp_path / "unpacked")


def test_a_directory_of_any_length_is_not_read(tmp_path: Path) -> None:
    """It is read as a whole, and a gigabyte of it takes tens of gigabytes."""
    archive = tmp_path / "long.zip"
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 65_535, 65_535, 1 << 30, 0, 0)
    with archive.open("wb") as out:
        out.seek(1 << 30)  # a sparse file
        out.write(end)
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with pytest.raises(InvalidVersionFolder, match="lists more than 1000 files"):
        unpack_version(archive, tmp_path / "unpacked")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB
    assert time.monotonic() - started < 5


def test_a_full_disk_is_not_the_archives_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = zipped(tmp_path / "v.zip", CARD_MEMBER)
    real = Path.open

    def full(path: Path, mode: str = "r", *rest: Any, **more: Any) -> IO[Any]:
        if mode == "xb":
            raise OSError(28, "No space left on device")
        return real(path, mode, *rest, **more)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(OSError, match="No space left"):
        unpack_version(archive, tmp_path / "unpacked")
