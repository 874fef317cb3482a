"""Read, verify and write version folders. `index.version` lists their files, `card` parses their JSON."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path, PurePosixPath

from index.errors import InvalidVersionFolder
from index.version import (
    CARD,
    EDGE,
    EDGE_ARRAYS,
    EDGE_DOMAIN,
    EDGE_MODEL,
    ENCODER,
    PROBE,
    SIDE,
    TEXT_FILES,
    TEXT_PROBE,
    Card,
    Edge,
    Version,
)
from index.version_folder.archive import check_path
from index.version_folder.card import parse_card, parse_edge
from index.version_folder.checked_json import parse_checked, read_bounded


def load_version(folder: Path, *, expect_card: str | None = None) -> Version:
    """Read a version folder and verify its structure: card, sha256 of every file, edges, no links or unlisted files.

    Args:
        folder: the directory with card.json.
        expect_card: the sha256 that card.json must have, if it was registered before.

    Raises:
        InvalidVersionFolder: names the file and, inside JSON, the field at fault.
    """
    card_bytes = _read(folder, CARD)
    if expect_card is not None and hashlib.sha256(card_bytes).hexdigest() != expect_card:
        raise InvalidVersionFolder(f"{CARD} changed on disk after the version was registered", pointer=f"/{CARD}")
    card = parse_card(parse_checked(card_bytes, CARD))
    found = (p for p in folder.rglob("*") if p.is_symlink() or not p.is_dir())
    present = {p.relative_to(folder).as_posix() for p in found} - {CARD}
    for path in sorted(set(card.files) | present):
        _check_file(folder, path, card.files.get(path))
    _check_parts(card)
    return Version(card, folder, tuple(_load_edge(folder, card, old) for old in _edge_names(card)))


def load_given_version(folder: Path) -> Version:
    """As `load_version`, for one of several folders that a user named, or a recipe: errors name it."""
    try:
        return load_version(folder)
    except InvalidVersionFolder as error:
        raise InvalidVersionFolder(f"{folder}: {error}", pointer=error.pointer) from error


def load_edge(folder: Path, new: str, old: str) -> Edge:
    """Read the folder of a single edge, laid out as edges/<old>/ of a version folder.

    Raises:
        InvalidVersionFolder: names the file and, inside JSON, the field at fault; also if a file is not used by the
            edge's kind.
    """
    found = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_symlink() or not p.is_dir()}
    edge = parse_edge(parse_checked(_read(folder, EDGE), EDGE), new, old, folder, found)
    legal = {EDGE, EDGE_DOMAIN, EDGE_MODEL.get(edge.kind), EDGE_ARRAYS.get(edge.kind)}
    if stray := sorted(found - legal):
        raise InvalidVersionFolder(f"{stray[0]} is not part of an edge of kind {edge.kind}", pointer=f"/{stray[0]}")
    return edge


def write_card(folder: Path, card: Card) -> Card:
    """Hash every file below `folder` into the card, write card.json last, and return the finished card."""
    paths = sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / CARD)
    files = {p.relative_to(folder).as_posix(): sha256(p) for p in paths}
    finished = Card(**{**vars(card), "files": files})
    (folder / CARD).write_text(json.dumps(finished.as_json(), indent=2) + "\n")
    return finished


def write_edge(folder: Path, edge: Edge) -> None:
    """Write edges/<old>/edge.json below a version folder; the caller must then call `write_card`."""
    place = folder / "edges" / edge.old
    place.mkdir(parents=True, exist_ok=True)
    (place / EDGE).write_text(json.dumps(edge.as_json(), indent=2) + "\n")


def sha256(path: Path) -> str:
    """Hexadecimal sha256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def card_sha256(folder: Path) -> str:
    """sha256 of card.json. It identifies all content of a version, as the card lists the sha256 of every other file."""
    return hashlib.sha256((folder / CARD).read_bytes()).hexdigest()


def files_of(folder: Path) -> dict[str, str]:
    """Name -> sha256 of the files in an edge's folder."""
    return {path.name: sha256(path) for path in sorted(folder.iterdir())}


def edge_files(card: Card, old: str) -> dict[str, str]:
    """Name -> sha256 of the files of a version's edge to `old`, as its card lists them."""
    place = f"edges/{old}/"
    return {path.removeprefix(place): sha for path, sha in card.files.items() if path.startswith(place)}


def _check_file(folder: Path, path: str, expected: str | None) -> None:
    check_path(path)
    if expected is None:
        raise InvalidVersionFolder(f"{path} is not listed in {CARD}", pointer=f"/{path}")
    # resolve() also detects a link in a parent folder.
    if (folder / path).resolve() != folder.resolve().joinpath(*PurePosixPath(path).parts):
        raise InvalidVersionFolder(f"{path} is a link; only regular files are legal", pointer=f"/{path}")
    if not (folder / path).is_file():
        raise InvalidVersionFolder(f"{path} is listed in {CARD} but missing", pointer=f"/{path}")
    if sha256(folder / path) != expected:
        raise InvalidVersionFolder(f"{path} does not have the sha256 that {CARD} lists", pointer=f"/{path}")


def _check_parts(card: Card) -> None:
    if card.encoder and card.preprocess is None:
        raise InvalidVersionFolder(f"{CARD}: preprocess is required with {ENCODER}", pointer="/preprocess")
    if not card.encoder and card.preprocess is not None:
        raise InvalidVersionFolder(f"{ENCODER} is missing: {CARD} has a preprocess field", pointer=f"/{ENCODER}")
    if bool(card.side_dim) != (SIDE in card.files) and card.encoder:
        raise InvalidVersionFolder(
            f"{CARD}: side_dim must be above 0 if and only if {SIDE} exists", pointer="/side_dim"
        )
    if card.encoder and PROBE not in card.files:
        raise InvalidVersionFolder(f"{PROBE} is missing: an encoder requires a stored probe", pointer=f"/{PROBE}")
    _check_text(card)


def _check_text(card: Card) -> None:
    """Check that a text entrance has all of its files or none; that of a provider's API may only have a probe."""
    given = {path for path in card.files if PurePosixPath(path).parts[0] == "text"}
    if card.api is not None:
        if model := sorted(given - {TEXT_PROBE} | {ENCODER} & set(card.files)):
            raise InvalidVersionFolder(f"{model[0]} cannot be used with api", pointer="/api")
        return
    for path in TEXT_FILES:
        if given and path not in given:
            raise InvalidVersionFolder(
                f"{path} is missing: a text entrance has {', '.join(TEXT_FILES)}", pointer=f"/{path}"
            )
    if unknown := sorted(given - set(TEXT_FILES)):
        raise InvalidVersionFolder(
            f"{unknown[0]} is not part of a text entrance, which has {', '.join(TEXT_FILES)}", pointer=f"/{unknown[0]}"
        )


def _edge_names(card: Card) -> list[str]:
    found = [PurePosixPath(path).parts for path in card.files]
    return sorted({parts[1] for parts in found if parts[0] == "edges" and len(parts) > 2})


def _load_edge(folder: Path, card: Card, old: str) -> Edge:
    place = f"edges/{old}"
    files = edge_files(card, old)
    value = parse_checked(_read(folder, f"{place}/{EDGE}"), f"{place}/{EDGE}")
    return parse_edge(value, card.name, old, folder / place, files, f"{place}/")


def _read(folder: Path, path: str) -> bytes:
    if (folder / path).is_symlink():
        raise InvalidVersionFolder(f"{path} is a link; only regular files are legal", pointer=f"/{path}")
    try:
        return read_bounded(folder / path, path)
    except OSError as error:
        raise InvalidVersionFolder(f"{path} is missing or unreadable", pointer=f"/{path}") from error
