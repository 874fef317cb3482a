"""Builders of tiny but complete version folders, and of images. Nothing here needs torch.

`make_version(folder, name, dim, ...)` writes a valid version folder (card, encoder.onnx, probe, edges) whose encoder is
Flatten -> MatMul (a random projection of the pixels) -> LpNormalization, and returns the loaded `Version`:

    v1 = make_version(tmp_path / "v1", "v1", 4)
    v2 = make_version(tmp_path / "v2", "v2", 6, edges=[(v1, "truncate")])           # v2's first 4 columns are v1's
    v3 = make_version(tmp_path / "v3", "v3", 4, drift=0.1, edges=[(v1, "identity", 0.7)])  # measured CMC@1 0.7

Each column of the projection depends only on `seed` and its number, so versions with the same seed agree on their
common components (truncate and zero_pad are exact). `drift` > 0 makes a slightly different encoder, another `seed` an
unrelated one. `matrix`, `onnx` and `forward` edges are least-squares fits between the two encoders (`forward` works
well only if the old dimension plus side_dim is at least the new dimension); `slerp` edges are a Procrustes map with
alpha 0.4. If a version has both side_dim and a `forward` edge, the edge also outputs its side-information.

`add_text(version, words)` adds a text entrance: each word has a vector, and a text is embedded as the direction of the
mean of its words' vectors (`<unk>` for unknown words).

`tell_variance(version, old)` adds a variance to a version's item edge from `old`, `tell_no_side(version, old)` removes
its side-information.

`make_image(label, seed)` returns a decoded 8 x 8 image of class `label` (classes are far apart, seeds of one class are
close), `image_bytes(image, format)` its file.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from index.edges.transform import normalise_or_zero
from index.encoders.image import preprocess
from index.query.query_plan import Encode
from index.space import Vectors, space_from_json
from index.version import (
    EDGE_ARRAYS,
    EDGE_MODEL,
    ENCODER,
    PROBE,
    SIDE,
    TEXT_ENCODER,
    TEXT_PROBE,
    TOKENIZER,
    Card,
    Edge,
    EdgeKind,
    Preprocess,
    Score,
    Version,
)
from index.version_folder.archive import pack_version
from index.version_folder.folder import load_version, write_card, write_edge

SPEC = Preprocess(height=8, width=8, mode="L", mean=(0.5,), std=(0.5,))


def make_version(
    folder: Path,
    name: str,
    dim: int,
    *,
    space: dict[str, Any] | None = None,
    seed: int = 0,
    drift: float = 0.0,
    side_dim: int = 0,
    encoder: bool = True,
    edges: Sequence[tuple[Any, ...]] = (),
) -> Version:
    """Write and load a version folder; see the top of this file.

    Args:
        folder: the version's folder, which is created.
        name: the version's name.
        dim: its dimension.
        space: the card's space, cosine by default.
        seed: seed of the projection; equal seeds agree on common components.
        drift: relative noise, by `name`, that is added to the projection.
        side_dim: width of the side-information; above 0 writes side.onnx.
        encoder: False writes a version that takes embeddings only.
        edges: (old Version, kind) or (old Version, kind, measured CMC@1).
    """
    folder.mkdir(parents=True)
    space = space or {"kind": "cosine"}
    weight = projection(seed, dim)
    if drift:
        weight = weight + drift * projection(sum(name.encode()), dim)
    card = Card(name, dim, space, SPEC if encoder else None, side_dim, method="independent")
    probe: dict[str, Any] = {"image": preprocess(make_image(3, 99), SPEC)[None]}
    if encoder:
        probe["embedding"] = _save_encoder(folder / ENCODER, weight, space["kind"] == "cosine", probe["image"])
    if encoder and side_dim:
        probe["side"] = _save_encoder(folder / SIDE, projection(7, side_dim), False, probe["image"])
    if encoder:
        np.savez(folder / PROBE, **probe)
    for old, kind, *measured in edges:
        _save_edge(folder, card, weight, old, EdgeKind(kind), measured[0] if measured else 0.9)
    write_card(folder, card)
    return load_version(folder)


def zip_version(folder: Path) -> bytes:
    """A version folder as the bytes of its archive."""
    archive = folder.parent / f"{folder.name}.zip"
    pack_version(folder, archive)
    return archive.read_bytes()


def add_text(version: Version, words: dict[str, np.ndarray], *, limit: int = 8, probe: str = "") -> Version:
    """Add a text entrance and load the version again.

    Args:
        version: a cosine version; its folder is changed.
        words: word -> vector (dim,); `<pad>` and `<unk>` get further vectors.
        limit: tokens after which a text is truncated.
        probe: the text of the probe; the first word by default.
    """
    rng = np.random.default_rng(11)
    table = np.stack([*rng.normal(size=(2, version.card.dim)), *words.values()]).astype(np.float32)
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<unk>", *words])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.enable_truncation(limit)
    (version.folder / "text").mkdir(exist_ok=True)
    tokenizer.save(str(version.folder / TOKENIZER))
    save_text_model(version.folder / TEXT_ENCODER, table)
    probe = probe or next(iter(words))
    mean = table[tokenizer.encode(probe).ids].mean(axis=0)
    stored = {"text": probe, "embedding": (mean / np.linalg.norm(mean)).tolist()}
    (version.folder / TEXT_PROBE).write_text(json.dumps(stored))
    write_card(version.folder, version.card)
    return load_version(version.folder)


def tell_variance(version: Version, old: str) -> Version:
    """Add a variance to a version's item edge from `old`, and load the version again.

    The variance is the absolute value of the embedding's first number.
    """
    path = version.folder / "edges" / old / EDGE_MODEL[EdgeKind.FORWARD]
    model = onnx.load(path)
    width = sum(given.type.tensor_type.shape.dim[1].dim_value for given in model.graph.input)
    model.graph.initializer.append(numpy_helper.from_array(np.eye(width, 1, dtype=np.float32), "first"))
    model.graph.node.append(helper.make_node("MatMul", ["all", "first"], ["signed"]))
    model.graph.node.append(helper.make_node("Abs", ["signed"], ["variance"]))
    model.graph.output.append(helper.make_tensor_value_info("variance", TensorProto.FLOAT, ("N", 1)))
    path.write_bytes(model.SerializeToString())
    write_card(version.folder, version.card)
    return load_version(version.folder)


def tell_no_side(version: Version, old: str) -> Version:
    """Remove the side-information from the outputs of a version's item edge from `old`, and load the version again."""
    path = version.folder / "edges" / old / EDGE_MODEL[EdgeKind.FORWARD]
    model = onnx.load(path)
    del model.graph.output[1:]
    path.write_bytes(model.SerializeToString())
    write_card(version.folder, version.card)
    return load_version(version.folder)


def save_text_model(path: Path, table: np.ndarray) -> None:
    """Write a model: the direction of the mean of the tokens' rows of `table`, weighted by mask ** `power`."""
    nodes = [
        helper.make_node("Cast", ["attention_mask"], ["given"], to=TensorProto.FLOAT),
        helper.make_node("Pow", ["given", "power"], ["weight"]),
        helper.make_node("Unsqueeze", ["weight", "last"], ["mask"]),
        helper.make_node("Gather", ["table", "input_ids"], ["rows"]),
        helper.make_node("Mul", ["rows", "mask"], ["kept"]),
        helper.make_node("ReduceSum", ["kept", "middle"], ["sum"], keepdims=0),
        helper.make_node("LpNormalization", ["sum"], ["out"], axis=1),
    ]
    inputs = {"input_ids": ("N", "L"), "attention_mask": ("N", "L")}
    save_model(
        path,
        nodes,
        inputs,
        ("N", table.shape[1]),
        TensorProto.INT64,
        table=table,
        last=np.array([2]),
        middle=np.array([1]),
        power=np.array(1, np.float32),
    )


def projection(seed: int, dim: int) -> np.ndarray:
    """(64, dim) random columns, each by (seed, its number), so that fewer columns are a prefix of more."""
    columns = [np.random.default_rng([seed, column]).normal(size=64) for column in range(dim)]
    return np.stack(columns, axis=1).astype(np.float32) / 8


def make_image(label: int, seed: int = 0) -> Image.Image:
    """An 8 x 8 grey image: the pattern of class `label` plus a little noise of `seed`."""
    pattern = np.random.default_rng([1, label]).uniform(30, 225, size=(8, 8))
    noise = np.random.default_rng([2, label, seed]).normal(scale=20, size=(8, 8))
    return Image.fromarray((pattern + noise).clip(0, 255).astype(np.uint8))


def image_bytes(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:  # noqa: A002
    """The image as a file."""
    stream = io.BytesIO()
    image.save(stream, format, **options)
    return stream.getvalue()


def save_model(
    path: Path,
    nodes: Sequence[Any],
    inputs: Mapping[str, tuple[str | int, ...]],
    output: tuple[str | int, ...],
    given: int = TensorProto.FLOAT,
    **arrays: np.ndarray,
) -> None:
    """Write an ONNX model with one output `out`; shapes are tuples, "N" for a free size."""
    declared = [helper.make_tensor_value_info(n, given, shape) for n, shape in inputs.items()]
    out = helper.make_tensor_value_info("out", TensorProto.FLOAT, output)
    constants = [numpy_helper.from_array(array, array_name) for array_name, array in arrays.items()]
    graph = helper.make_graph(list(nodes), "tiny", declared, [out], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    path.write_bytes(model.SerializeToString())


def _save_encoder(path: Path, weight: np.ndarray, unit: bool, probe: np.ndarray) -> np.ndarray:
    last = helper.make_node("LpNormalization" if unit else "Identity", ["z"], ["out"], **({"axis": 1} if unit else {}))
    nodes = [
        helper.make_node("Flatten", ["image"], ["flat"]),
        helper.make_node("MatMul", ["flat", "weight"], ["z"]),
        last,
    ]
    save_model(path, nodes, {"image": ("N", 1, 8, 8)}, ("N", weight.shape[1]), weight=weight)
    return _embed(probe.reshape(1, -1), weight, unit)


def _embed(pixels: np.ndarray, weight: np.ndarray, unit: bool) -> np.ndarray:
    return normalise_or_zero(space_from_json({"kind": "cosine" if unit else "l2"}), pixels @ weight)


def _save_edge(folder: Path, card: Card, weight: np.ndarray, old: Version, kind: EdgeKind, measured: float) -> None:
    scores = {"cmc@1": Score(measured, measured - 0.05, measured + 0.05)}
    write_edge(folder, Edge(card.name, old.name, kind, scores, old.card.encoder))
    place = folder / "edges" / old.name
    pixels = np.random.default_rng(5).uniform(-1, 1, size=(512, 64)).astype(np.float32)
    new_vectors = _embed(pixels, weight, card.space["kind"] == "cosine")
    old_vectors = _embed(pixels, _weight_of(old), old.card.space["kind"] == "cosine")
    if kind is EdgeKind.MATRIX:
        np.savez(place / EDGE_ARRAYS[kind], weight=_fit(new_vectors, old_vectors))
    if kind is EdgeKind.SLERP:
        left, _, right = np.linalg.svd(new_vectors.T @ old_vectors, full_matrices=False)
        np.savez(place / EDGE_ARRAYS[kind], weight=left @ right, alpha=np.float32(0.4))
    if kind is EdgeKind.ONNX:
        _save_map(place / EDGE_MODEL[kind], _fit(new_vectors, old_vectors), {"embedding": card.dim})
    if kind is EdgeKind.FORWARD:
        side = pixels @ projection(7, old.card.side_dim) if old.card.side_dim else np.empty((512, 0), np.float32)
        widths = {"embedding": old.card.dim} | ({"side": old.card.side_dim} if old.card.side_dim else {})
        given = np.hstack([old_vectors, side])
        _save_map(place / EDGE_MODEL[kind], _fit(given, new_vectors), widths)
        if card.side_dim:
            extra = _fit(given, pixels @ projection(7, card.side_dim))
            node = helper.make_node("MatMul", ["all", "extra"], ["next_side"])
            add_output(place / EDGE_MODEL[kind], "next_side", node, extra)


def add_output(path: Path, name: str, node: Any, extra: np.ndarray) -> None:
    """Add an output (N, width of `extra`) to an edge's model, computed by a node that reads `all` and `extra`."""
    model = onnx.load(path)
    model.graph.initializer.append(numpy_helper.from_array(extra, "extra"))
    model.graph.node.append(node)
    model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, ("N", extra.shape[1])))
    path.write_bytes(model.SerializeToString())


def _save_map(path: Path, weight: np.ndarray, widths: dict[str, int]) -> None:
    nodes = [
        helper.make_node("Concat", list(widths), ["all"], axis=1),
        helper.make_node("MatMul", ["all", "weight"], ["z"]),
        helper.make_node("LpNormalization", ["z"], ["out"], axis=1),
    ]
    inputs = {name: ("N", width) for name, width in widths.items()}
    save_model(path, nodes, inputs, ("N", weight.shape[1]), weight=weight)


def _fit(given: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    return np.linalg.lstsq(given.astype(np.float64), wanted.astype(np.float64), rcond=None)[0].astype(np.float32)


def _weight_of(version: Version) -> np.ndarray:
    """The projection an encoder was written with; an arbitrary one for a version without encoder."""
    if not version.card.encoder:
        return projection(0, version.card.dim)
    model = onnx.load(version.folder / ENCODER)
    weight: np.ndarray = numpy_helper.to_array(next(i for i in model.graph.initializer if i.name == "weight"))
    return weight


def always(queries: Vectors) -> Encode:
    """An `Encode` that returns these queries for every version."""
    return lambda version: queries
