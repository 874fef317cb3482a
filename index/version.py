"""Vocabulary: version, card and edge, and the files of a version folder (docs/design.md, section 3).

    v2/card.json             what the version is, and the sha256 of every other file
    v2/encoder.onnx          float32 (N, C, H, W) -> (N, dim), ready to compare; absent: embeddings come from outside
    v2/side.onnx             optional: the same input -> (N, side_dim), stored with each item (FCT)
    v2/probe.npz             `image` (1, C, H, W) and the expected `embedding` (1, dim), `side` (1, side_dim)
    v2/text/encoder.onnx     optional second entrance: int64 `input_ids`, `attention_mask` (N, L) -> (N, dim)
    v2/text/tokenizer.json   its tokenizer (Hugging Face `tokenizers`), with a truncation
    v2/text/probe.json       `text` and the expected `embedding`, a list of dim numbers; for an API, alone in text/
    v2/edges/v1/edge.json    how to compare with v1, and how well it was measured to work

`index.version_folder.folder` reads, checks and writes such a folder; `encoder` and `text` of `index.encoders` run its
probes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar

CARD = "card.json"
ENCODER = "encoder.onnx"
SIDE = "side.onnx"
PROBE = "probe.npz"
TEXT_ENCODER = "text/encoder.onnx"
TOKENIZER = "text/tokenizer.json"
TEXT_PROBE = "text/probe.json"
TEXT_FILES = (TEXT_ENCODER, TOKENIZER, TEXT_PROBE)
EDGE = "edge.json"
FORMAT = 1
MAX_DIM = 65_536

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Legal names of versions and galleries: safe in a path, a URL and a log line."""


class EdgeKind(StrEnum):
    """The ways to compare a newer version with an older one."""

    IDENTITY = "identity"
    TRUNCATE = "truncate"
    ZERO_PAD = "zero_pad"
    MATRIX = "matrix"
    ONNX = "onnx"
    SLERP = "slerp"
    DUAL = "dual"
    FORWARD = "forward"

    @property
    def direction(self) -> str:
        """`item` if the edge maps stored items into the new space, else `query`."""
        return "item" if self is EdgeKind.FORWARD else "query"


class Origin(StrEnum):
    """How a stored embedding was produced: by the version's encoder, by a forward edge, or outside."""

    ENCODED = "encoded"
    TRANSFORMED = "transformed"
    SUPPLIED = "supplied"


EdgeKey = tuple[str, str, str]
"""(new, old, kind): two versions have at most one edge of each kind."""

ShardKey = tuple[str, str]
"""(version, origin): a gallery has one shard for each."""

EDGE_MODEL = {EdgeKind.ONNX: "edge.onnx", EdgeKind.FORWARD: "edge.onnx"}
EDGE_DOMAIN = "domain.npz"
"""A file of a fitted edge: statistics of the data that it was fitted on, see `index.evaluation.domain`."""
EDGE_ARRAYS = {EdgeKind.MATRIX: "edge.npz", EdgeKind.SLERP: "edge.npz"}


@dataclass(frozen=True)
class Score:
    """A measured metric with its bootstrap interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Edge:
    """A declared, measured way to compare version `new` with the older version `old`.

    Attributes:
        scores: metric ("cmc@1", "mAP@1.0", ...) -> M(new/old).
        old_encoder: sha256 of the old version's encoder.onnx that the edge was made for; "" if it has none.
        calibration: see `index.edges.calibration`.
        support: number of pairs of embeddings that an adapter was fitted on; 0 for other edges.
        hashes: file name -> sha256, for accepted files; checked whenever a file is opened.
    """

    new: str
    old: str
    kind: EdgeKind
    scores: Mapping[str, Score] = field(default_factory=dict)
    old_encoder: str = ""
    calibration: Mapping[str, Any] | None = None
    folder: Path | None = None
    support: int = 0
    hashes: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> EdgeKey:
        """The key, unique among the edges of a gallery."""
        return self.new, self.old, self.kind.value

    @property
    def measured(self) -> float:
        """The score for choosing routes: CMC@1, else the mean of all scores, else 0."""
        if "cmc@1" in self.scores:
            return self.scores["cmc@1"].value
        return sum(s.value for s in self.scores.values()) / len(self.scores) if self.scores else 0.0

    def as_json(self) -> dict[str, Any]:
        """The content of edge.json; the names of the versions are those of the folders."""
        return {
            "kind": self.kind.value,
            "direction": self.kind.direction,
            "scores": {name: vars(score) for name, score in self.scores.items()},
            "old_encoder": self.old_encoder,
            "calibration": self.calibration,
            "support": self.support,
        }


@dataclass(frozen=True)
class Preprocess:
    """Preprocessing of a decoded image for the encoder, the same in evaluation during training and in serving.

    1. Convert to `mode` ("L" or "RGB").
    2. Resize with antialiased `interpolation` so that the shorter side has `resize` pixels (a pair: to this height and
       width; None: do not resize), then crop the centre to (height, width). `stretch`: only resize to (height, width).
    3. Divide by 255, subtract `mean`, divide by `std` (one number per channel).

    `crop` rounds half of an odd margin: `round` to even, as torchvision and timm; `floor` down, as Hugging Face.
    """

    height: int
    width: int
    mode: str = "RGB"
    resize: int | tuple[int, int] | None = None
    stretch: bool = False
    interpolation: str = "bilinear"
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)
    crop: str = "round"

    CROPS: ClassVar = ("round", "floor")
    MODES: ClassVar = {"L": 1, "RGB": 3}
    INTERPOLATIONS: ClassVar = ("nearest", "bilinear", "bicubic", "lanczos")

    @property
    def channels(self) -> int:
        """Number of channels of the encoder's input."""
        return self.MODES[self.mode]

    def as_json(self) -> dict[str, Any]:
        """The `preprocess` field of a card."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in vars(self).items()}


@dataclass(frozen=True)
class EmbeddingApi:
    """A provider's API that embeds texts: `POST {url}/embeddings`, compatible with OpenAI's.

    Attributes:
        url: the base URL, without a trailing slash.
        model: the provider's name of the model.
        key: the environment variable with the API key; "": none is needed.
        shorten: whether requests state the version's dimension (`dimensions`).
        batch_size: largest number of texts in one call.
        requests_per_minute, tokens_per_minute: limits of one process; None: no limit.
        price: price of a million tokens, in any currency; None: unknown.
        encoding: `encoding_format` of embeddings, `float` or `base64`.
    """

    ENCODINGS: ClassVar = ("float", "base64")

    url: str
    model: str
    key: str = ""
    shorten: bool = False
    batch_size: int = 128
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    price: float | None = None
    encoding: str = "float"


@dataclass(frozen=True)
class Card:
    """The content of card.json. `space` is kept as JSON; `index.space.space_from_json` parses it.

    Attributes:
        prompts: side (one of `PROMPTS`) -> the prefix of texts in the text entrance.
        api: the provider that is the text entrance; None: no provider.
        files: path -> sha256 of every other file of the folder.
    """

    PROMPTS: ClassVar = ("query", "item")

    name: str
    dim: int
    space: Mapping[str, Any]
    preprocess: Preprocess | None = None
    side_dim: int = 0
    method: str = "unknown"
    recipe: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    prompts: Mapping[str, str] = field(default_factory=dict)
    api: EmbeddingApi | None = None
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def encoder(self) -> str:
        """sha256 of encoder.onnx; "" if the version has none."""
        return self.files.get(ENCODER, "")

    @property
    def text(self) -> bool:
        """Whether the version has a text entrance, a model or a provider's API."""
        return TEXT_ENCODER in self.files or self.api is not None

    def as_json(self) -> dict[str, Any]:
        """The content of card.json."""
        fields = {**vars(self), "preprocess": self.preprocess.as_json() if self.preprocess else None}
        if fields.pop("api") is not None:
            fields["api"] = vars(self.api)
        return {
            "format": FORMAT,
            **{name: dict(v) if isinstance(v, Mapping) else v for name, v in fields.items()},
        }


@dataclass(frozen=True)
class Version:
    """A version folder whose structure and hashes have been checked."""

    card: Card
    folder: Path
    edges: tuple[Edge, ...] = ()

    @property
    def name(self) -> str:
        """The card's name."""
        return self.card.name
