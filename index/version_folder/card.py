"""Parse card.json (`parse_card`) and edge.json (`parse_edge`) and check every field.

An error names the field and its legal values. `index.version` defines the fields.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from index.errors import InvalidVersionFolder
from index.version import (
    CARD,
    EDGE,
    EDGE_ARRAYS,
    EDGE_MODEL,
    FORMAT,
    MAX_DIM,
    NAME,
    Card,
    Edge,
    EdgeKind,
    EmbeddingApi,
    Preprocess,
    Score,
)

MAX_PROMPT = 1000
"""Longest prompt, in characters."""
MAX_API_BATCH = 10_000
"""Largest number of texts in one call of a provider's API."""
URL = re.compile(r"https?://([\w.-]+|\[[\da-fA-F:.]+\])(:\d+)?(/[\w.~%-]+)*", re.ASCII)
VARIABLE = re.compile(r"[A-Z][A-Z0-9_]{0,63}")
MAX_PIXEL = 1e6
"""Largest absolute mean, and largest reciprocal of a standard deviation, of pixels in [0, 1]."""


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


def parse_preprocess(value: object, file: str = CARD, prefix: str = "preprocess/") -> Preprocess:
    """Read the `preprocess` field of a card, or a file with only this object.

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
        raise fields.wrong("key", "must name an environment variable such as OPENAI_API_KEY, not one of Regraft's")
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


def parse_edge(value: object, new: str, old: str, folder: Path | None, files: Collection[str], place: str = "") -> Edge:
    """Read the JSON of edge.json.

    Args:
        value: the JSON.
        new: name of the newer version.
        old: name of the older version.
        folder: the folder of the edge's files; None: it has none.
        files: their names; or name -> sha256, which is then checked whenever a file is opened.
        place: prefix of file names in messages.

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


def _take_prompts(fields: _Fields) -> dict[str, str]:
    prompts: dict[str, str] = fields.take("prompts", dict, {})
    if not set(prompts) <= set(Card.PROMPTS) or not all(isinstance(text, str) for text in prompts.values()):
        raise fields.wrong("prompts", f"must hold texts by {' and '.join(Card.PROMPTS)}")
    if any(len(text) > MAX_PROMPT for text in prompts.values()):
        raise fields.wrong("prompts", f"must be texts of at most {MAX_PROMPT} characters")
    return prompts


def _take_resize(fields: _Fields) -> int | tuple[int, int] | None:
    value = fields.left.pop("resize", None)
    if value is None or type(value) is int:
        return value
    if not isinstance(value, list) or [type(side) for side in value] != [int, int]:
        raise fields.wrong("resize", "must be a whole number of pixels, or a list of two: height, width")
    return value[0], value[1]


def _is_base_url(url: str) -> bool:
    try:
        return URL.fullmatch(url) is not None and urlsplit(url).port != 0
    except ValueError:  # no IPv6 address in brackets, or a port above 65535
        return False


def _parse_score(fields: _Fields, name: str, value: object) -> Score:
    if (
        not isinstance(value, dict)
        or set(value) != {"value", "low", "high"}
        or any(type(number) not in (int, float) for number in value.values())
    ):
        raise fields.wrong(f"scores/{name}", "must hold the numbers value, low and high")
    return Score(**value)


class _Fields:
    """Takes the known fields out of a JSON object one by one; the remaining ones are unknown."""

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
            raise self.wrong(min(self.left), "is not a field of this release")
