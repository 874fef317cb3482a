"""The version folder on disk: read and verify, write. See `index.version` for its files."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from index.archive import check_path
from index.checked_json import parse_checked, read_bounded
from index.errors import InvalidVersionFolder
from index.version import (
    CARD,
    EDGE,
    EDGE_ARRAYS,
    EDGE_DOMAIN,
    EDGE_MODEL,
    ENCODER,
    FORMAT,
    MAX_DIM,
    NAME,
    PROBE,
    SIDE,
    TEXT_FILES,
    TEXT_PROBE,
    Card,
    Edge,
    EdgeKind,
    EmbeddingApi,
    Preprocess,
    Score,
    Version,
)

MAX_PROMPT = 1000
"""Characters of a prompt."""
MAX_API_BATCH = 10_000
"""Texts in one call of a provider's API."""
URL = re.compile(r"https?://([\w.-]+|\[[\da-fA-F:.]+\])(:\d+)?(/[\w.~%-]+)*", re.ASCII)
VARIABLE = re.compile(r"[A-Z][A-Z0-9_]{0,63}")
MAX_PIXEL = 1e6
"""The largest mean, and one over the smallest standard deviation, of a pixel in [0, 1]."""


def load_version(folder: Path, *, expect_card: str | None = None) -> Version:
    """Read a version folder and verify its structure: card, sha256 of every file, edges, no stray or escaping file.

    Args:
        folder: the directory that holds card.json.
        expect_card: sha256 the card itself must have, when it is known from an earlier registration.

    Raises:
        InvalidVersionFolder: names the file and, inside JSON, the field at fault.
    """
    card_bytes = _read(folder, CARD)
    if expect_card is not None and hashlib.sha256(card_bytes).hexdigest() != expect_card:
        raise InvalidVersionFolder(f"{CARD} changed on disk since the version was registered", pointer=f"/{CARD}")
    card = parse_card(parse_checked(card_bytes, CARD))
    found = (p for p in folder.rglob("*") if p.is_symlink() or not p.is_dir())
    present = {p.relative_to(folder).as_posix() for p in found} - {CARD}
    for path in sorted(set(card.files) | present):
        _check_file(folder, path, card.files.get(path))
    _check_parts(card)
    return Version(card, folder, tuple(_load_edge(folder, card, old) for old in _edge_names(card)))


def parse_card(value: object) -> Card:
    """Read the JSON of card.json.

    Raises:
        InvalidVersionFolder: names the field and its legal values.
    """
    fields = _Fields(value, CARD)
    if fields.take("format", int) != FORMAT:
        raise fields.wrong("format", f"must be {FORMAT}, the only format this release reads")
    name = fields.take("name", str)
    if not NAME.fullmatch(name):
        raise fields.wrong("name", "must be 1 to 64 letters, digits, '.', '_' or '-', starting with a letter or digit")
    dim = fields.take("dim", int)
    if not 1 <= dim <= MAX_DIM:
        raise fields.wrong("dim", f"must be 1 to {MAX_DIM}")
    side_dim = fields.take("side_dim", int, 0)
    if not 0 <= side_dim <= MAX_DIM:
        raise fields.wrong("side_dim", f"must be 0 to {MAX_DIM}")
    files = fields.take("files", dict, {})
    for path, sha in files.items():
        if not isinstance(sha, str) or not re.fullmatch(r"[0-9a-f]{64}", sha):
            raise fields.wrong(f"files/{path}", "must be a sha256 in lower-case hexadecimal")
    preprocess, api = fields.take("preprocess", dict, None), fields.take("api", dict, None)
    card = Card(
        name=name,
        dim=dim,
        space=fields.take("space", dict),
        preprocess=parse_preprocess(preprocess) if preprocess is not None else None,
        side_dim=side_dim,
        method=fields.take("method", str, "unknown"),
        recipe=fields.take("recipe", dict, {}),
        data=fields.take("data", dict, {}),
        metrics=fields.take("metrics", dict, {}),
        prompts=_take_prompts(fields),
        api=parse_api(api) if api is not None else None,
        files=files,
    )
    fields.finish()
    return card


def write_card(folder: Path, card: Card) -> Card:
    """Hash every file below `folder` into the card, write card.json last, and return the finished card."""
    paths = sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / CARD)
    files = {p.relative_to(folder).as_posix(): sha256(p) for p in paths}
    finished = Card(**{**vars(card), "files": files})
    part = folder / f".{CARD}.part"
    part.write_text(json.dumps(finished.as_json(), indent=2) + "\n")
    part.replace(folder / CARD)
    return finished


def write_edge(folder: Path, edge: Edge) -> None:
    """Write edges/<old>/edge.json below a version folder; the caller rewrites the card afterwards."""
    place = folder / "edges" / edge.old
    place.mkdir(parents=True, exist_ok=True)
    (place / EDGE).write_text(json.dumps(edge.as_json(), indent=2) + "\n")


def load_edge(folder: Path, new: str, old: str) -> Edge:
    """Read the folder of a single edge, as it lies in a version folder below edges/<old>/.

    Raises:
        InvalidVersionFolder: names the file and, inside JSON, the field at fault; also a file that the kind has no use
            for.
    """
    found = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_symlink() or not p.is_dir()}
    edge = parse_edge(parse_checked(_read(folder, EDGE), EDGE), new, old, folder, found)
    legal = {EDGE, EDGE_DOMAIN, EDGE_MODEL.get(edge.kind), EDGE_ARRAYS.get(edge.kind)}
    if stray := sorted(found - legal):
        raise InvalidVersionFolder(f"{stray[0]} has no use in an edge of kind {edge.kind}", pointer=f"/{stray[0]}")
    return edge


def parse_edge(value: object, new: str, old: str, folder: Path | None, files: Collection[str], place: str = "") -> Edge:
    """Read the JSON of edge.json.

    Args:
        value: the JSON.
        new: the name of the newer version.
        old: the name of the older one.
        folder: where the edge's files lie, None when it has none.
        files: their names, or the sha256 of each by name, which the edge then is held to.
        place: what to put before file names in messages.

    Raises:
        InvalidVersionFolder: names the field and its legal values, or the file that is missing.
    """
    fields = _Fields(value, f"{place}{EDGE}")
    if not NAME.fullmatch(old) or old == new:
        where = place.rstrip("/")
        raise InvalidVersionFolder(f"{where} must be named after another, older version", pointer=f"/{where}")
    kind = fields.take("kind", str)
    legal = [k.value for k in EdgeKind if k is not EdgeKind.DUAL]  # dual needs no file: the old encoder is the edge
    if kind not in legal:
        raise fields.wrong("kind", f"must be one of {', '.join(legal)}")
    edge_kind = EdgeKind(kind)
    if fields.take("direction", str, edge_kind.direction) != edge_kind.direction:
        raise fields.wrong("direction", f"must be {edge_kind.direction!r} for kind {kind}")
    for needed in (EDGE_MODEL.get(edge_kind), EDGE_ARRAYS.get(edge_kind)):
        if needed and needed not in files:
            raise InvalidVersionFolder(f"{place}{needed} is missing: kind {kind} needs it", pointer=f"/{place}{needed}")
    support = fields.take("support", int, 0)
    if support < 0:
        raise fields.wrong("support", "must be 0 or more")
    edge = Edge(
        new=new,
        old=old,
        kind=edge_kind,
        scores={name: _parse_score(fields, name, s) for name, s in fields.take("scores", dict, {}).items()},
        old_encoder=fields.take("old_encoder", str, ""),
        calibration=fields.take("calibration", dict, None),
        folder=folder,
        support=support,
        hashes=files if isinstance(files, Mapping) else {},
    )
    fields.finish()
    return edge


def sha256(path: Path) -> str:
    """Hexadecimal sha256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def files_of(folder: Path) -> dict[str, str]:
    """Name -> sha256 of the files of an edge's folder."""
    return {path.name: sha256(path) for path in sorted(folder.iterdir())}


def card_sha256(folder: Path) -> str:
    """What identifies a version's content: its card lists the hash of every other file."""
    return hashlib.sha256((folder / CARD).read_bytes()).hexdigest()


def _check_file(folder: Path, path: str, expected: str | None) -> None:
    check_path(path)
    if expected is None:
        raise InvalidVersionFolder(f"{path} is not listed in {CARD}", pointer=f"/{path}")
    # resolve() catches a link anywhere on the way, also one to a folder.
    if (folder / path).resolve() != folder.resolve().joinpath(*PurePosixPath(path).parts):
        raise InvalidVersionFolder(f"{path} is a link; only plain files may travel", pointer=f"/{path}")
    if not (folder / path).is_file():
        raise InvalidVersionFolder(f"{path} is listed in {CARD} but missing", pointer=f"/{path}")
    if sha256(folder / path) != expected:
        raise InvalidVersionFolder(f"{path} does not have the sha256 that {CARD} lists", pointer=f"/{path}")


def _check_parts(card: Card) -> None:
    if card.encoder and card.preprocess is None:
        raise InvalidVersionFolder(f"{CARD}: preprocess is needed beside {ENCODER}", pointer="/preprocess")
    if not card.encoder and card.preprocess is not None:
        raise InvalidVersionFolder(f"{ENCODER} is missing: {CARD} has a preprocess field", pointer=f"/{ENCODER}")
    if bool(card.side_dim) != (SIDE in card.files) and card.encoder:
        raise InvalidVersionFolder(
            f"{CARD}: side_dim must be above 0 exactly when {SIDE} is there", pointer="/side_dim"
        )
    if card.encoder and PROBE not in card.files:
        raise InvalidVersionFolder(f"{PROBE} is missing: an encoder needs a stored probe", pointer=f"/{PROBE}")
    _check_text(card)


def _check_text(card: Card) -> None:
    """A text entrance is there as a whole, or not at all; a provider's API is one without files but a probe."""
    given = {path for path in card.files if PurePosixPath(path).parts[0] == "text"}
    if card.api is not None:
        if model := sorted(given - {TEXT_PROBE} | {ENCODER} & set(card.files)):
            raise InvalidVersionFolder(f"{model[0]} goes with no api: a version has one or the other", pointer="/api")
        return
    for path in TEXT_FILES:
        if given and path not in given:
            raise InvalidVersionFolder(
                f"{path} is missing: a text entrance is {', '.join(TEXT_FILES)}", pointer=f"/{path}"
            )
    if unknown := sorted(given - set(TEXT_FILES)):
        raise InvalidVersionFolder(
            f"{unknown[0]} is not part of a text entrance, which is {', '.join(TEXT_FILES)}", pointer=f"/{unknown[0]}"
        )


def _edge_names(card: Card) -> list[str]:
    found = [PurePosixPath(path).parts for path in card.files]
    return sorted({parts[1] for parts in found if parts[0] == "edges" and len(parts) > 2})


def edge_files(card: Card, old: str) -> dict[str, str]:
    """Name -> sha256 of the files of a version's edge to `old`, as its card lists them."""
    place = f"edges/{old}/"
    return {path.removeprefix(place): sha for path, sha in card.files.items() if path.startswith(place)}


def _load_edge(folder: Path, card: Card, old: str) -> Edge:
    place = f"edges/{old}"
    files = edge_files(card, old)
    value = parse_checked(_read(folder, f"{place}/{EDGE}"), f"{place}/{EDGE}")
    return parse_edge(value, card.name, old, folder / place, files, f"{place}/")


def _parse_score(fields: _Fields, name: str, value: object) -> Score:
    if not isinstance(value, dict) or set(value) != {"value", "low", "high"}:
        raise fields.wrong(f"scores/{name}", "must hold the numbers value, low and high")
    if not all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in value.values()):
        raise fields.wrong(f"scores/{name}", "must hold the numbers value, low and high")
    return Score(**value)


def parse_preprocess(value: object, file: str = CARD, prefix: str = "preprocess/") -> Preprocess:
    """Read the `preprocess` field of a card, or a file that holds nothing else.

    Raises:
        InvalidVersionFolder: names the field and its legal values.
    """
    fields = _Fields(value, file, prefix)
    height, width = fields.take("height", int), fields.take("width", int)
    mode = fields.take("mode", str, "RGB")
    if mode not in Preprocess.MODES:
        raise fields.wrong("mode", f"must be one of {', '.join(Preprocess.MODES)}")
    interpolation = fields.take("interpolation", str, "bilinear")
    if interpolation not in Preprocess.INTERPOLATIONS:
        raise fields.wrong("interpolation", f"must be one of {', '.join(Preprocess.INTERPOLATIONS)}")
    resize = _take_resize(fields)
    sides = resize if isinstance(resize, tuple) else (resize,)
    for name, pixels in (("height", height), ("width", width), *(("resize", side) for side in sides)):
        if pixels is not None and not 1 <= pixels <= 4096:
            raise fields.wrong(name, "must be 1 to 4096 pixels")
    stretch = fields.take("stretch", bool, False)
    channels = Preprocess.MODES[mode]
    mean, std = (fields.take(name, list, [default] * channels) for name, default in (("mean", 0.0), ("std", 1.0)))
    for name, numbers in (("mean", mean), ("std", std)):
        if len(numbers) != channels or not all(isinstance(n, (int, float)) and abs(n) <= MAX_PIXEL for n in numbers):
            raise fields.wrong(name, f"must be {channels} numbers of at most {MAX_PIXEL:g}, one per channel of {mode}")
    if any(number < 1 / MAX_PIXEL for number in std):
        raise fields.wrong("std", f"must be above 0, at least {1 / MAX_PIXEL:g}")
    crop = fields.take("crop", str, "round")
    if crop not in Preprocess.CROPS:
        raise fields.wrong("crop", f"must be one of {', '.join(Preprocess.CROPS)}")
    fields.finish()
    return Preprocess(height, width, mode, resize, stretch, interpolation, tuple(mean), tuple(std), crop)


def _take_prompts(fields: _Fields) -> dict[str, str]:
    prompts: dict[str, str] = fields.take("prompts", dict, {})
    if not set(prompts) <= set(Card.PROMPTS) or not all(isinstance(text, str) for text in prompts.values()):
        raise fields.wrong("prompts", f"must hold texts by {' and '.join(Card.PROMPTS)}")
    if any(len(text) > MAX_PROMPT for text in prompts.values()):
        raise fields.wrong("prompts", f"must be texts of at most {MAX_PROMPT} characters")
    return prompts


def parse_api(value: object, file: str = CARD, prefix: str = "api/") -> EmbeddingApi:
    """Read the `api` field of a card. Raises InvalidVersionFolder, which names the field and its legal values."""
    fields = _Fields(value, file, prefix)
    url, model = fields.take("url", str), fields.take("model", str)
    if not _is_base_url(url):
        raise fields.wrong("url", "must be http(s)://HOST/PATH without a slash, a user or a query at its end")
    if not 1 <= len(model) <= MAX_PROMPT or not model.isprintable():
        raise fields.wrong("model", f"must be a text of 1 to {MAX_PROMPT} printable characters")
    key = fields.take("key", str, "")
    if key and (not VARIABLE.fullmatch(key) or key.startswith("REGRAFT_")):
        raise fields.wrong("key", "must name an environment variable such as OPENAI_API_KEY, none of Regraft's own")
    batch_size = fields.take("batch_size", int, EmbeddingApi.batch_size)
    if not 1 <= batch_size <= MAX_API_BATCH:
        raise fields.wrong("batch_size", f"must be 1 to {MAX_API_BATCH}")
    limits = {name: fields.take_number(name) for name in ("requests_per_minute", "tokens_per_minute", "price")}
    encoding = fields.take("encoding", str, EmbeddingApi.encoding)
    if encoding not in EmbeddingApi.ENCODINGS:
        raise fields.wrong("encoding", f"must be one of {', '.join(EmbeddingApi.ENCODINGS)}")
    api = EmbeddingApi(url, model, key, fields.take("shorten", bool, False), batch_size, **limits, encoding=encoding)
    fields.finish()
    return api


def _is_base_url(url: str) -> bool:
    try:
        return URL.fullmatch(url) is not None and urlsplit(url).port != 0
    except ValueError:  # what stands in brackets is no address, or the port is beyond those there are
        return False


def _take_resize(fields: _Fields) -> int | tuple[int, int] | None:
    value = fields.left.pop("resize", None)
    if value is None or type(value) is int:
        return value
    if not isinstance(value, list) or [type(side) for side in value] != [int, int]:
        raise fields.wrong("resize", "must be a whole number of pixels, or a list of two: height, width")
    return value[0], value[1]


class _Fields:
    """Takes fields out of a JSON object one by one, so that what is left over is unknown."""

    def __init__(self, value: object, file: str, prefix: str = "") -> None:
        if not isinstance(value, dict):
            raise InvalidVersionFolder(f"{file} must hold a JSON object", pointer=f"/{file}")
        self.left, self.file, self.prefix = dict(value), file, prefix

    def take(self, name: str, kind: type, default: Any = ...) -> Any:
        value = self.left.pop(name, default)
        if value is ...:
            raise self.wrong(name, "is missing")
        if value is not default and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            if value is None and default is None:
                return None
            raise self.wrong(name, f"must be of type {kind.__name__}")
        return value

    def take_number(self, name: str) -> float | None:
        """A finite number above 0, or None."""
        value = self.left.pop(name, None)
        if value is not None and (type(value) not in (int, float) or not 0 < value < math.inf):
            raise self.wrong(name, "must be a number above 0")
        return None if value is None else float(value)

    def wrong(self, name: str, why: str) -> InvalidVersionFolder:
        return InvalidVersionFolder(f"{self.file}: {self.prefix}{name} {why}", pointer=f"/{self.prefix}{name}")

    def finish(self) -> None:
        if self.left:
            raise self.wrong(min(self.left), "is not a field this release knows")


def _read(folder: Path, path: str) -> bytes:
    if (folder / path).is_symlink():
        raise InvalidVersionFolder(f"{path} is a link; only plain files may travel", pointer=f"/{path}")
    try:
        return read_bounded(folder / path, path)
    except OSError as error:
        raise InvalidVersionFolder(f"{path} is missing or unreadable", pointer=f"/{path}") from error
