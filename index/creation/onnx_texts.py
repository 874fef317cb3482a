"""`OnnxTexts`: a version made of an ONNX file of texts and its tokenizer.json.

Shape suffixes: N texts, L tokens, D dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer

from index.creation import onnx_graph
from index.creation.onnx_file import read_model
from index.creation.onnx_graph import PREFIX, ModelProto
from index.creation.probes import compare, probe_texts, write_text_probe
from index.encoders.text import INPUTS, MAX_TOKENS, TextEncoder, panics_as_errors
from index.errors import InvalidArgument
from index.space import Cosine, Vectors, space_from_json
from index.version import TEXT_ENCODER, TOKENIZER, Card, Version
from index.version_folder.folder import sha256, write_card

IDS, MASK = INPUTS
TYPES = "token_type_ids"
"""A third input of some models: 0 for each token of a single text."""
INTEGERS = {TensorProto.INT64: np.int64, TensorProto.INT32: np.int32}
POOLS = {2: ("none",), 3: ("mean", "cls")}
"""Axes of a model's output -> the legal poolings."""
BATCH = 10
"""Texts in one run while the created encoder is compared."""


@dataclass(frozen=True)
class OnnxTexts:
    """An ONNX model of texts and its tokenizer.

    Args:
        path: a model of `input_ids` and `attention_mask` (N, L), and perhaps `token_type_ids`; N and L are free.
        tokenizer: a tokenizer.json of Hugging Face.
        max_tokens: where texts are cut; None: where the tokenizer says, at most at `MAX_TOKENS`.
        space: the `space` field of a card. For `cosine` the output is normalised to length 1.
        pool: `none` for an output (N, D), `mean` or `cls` for (N, L, D).
        output: name of the output, if there are several.
        prompts: the `prompts` field of a card.
    """

    path: Path
    tokenizer: Path
    max_tokens: int | None = None
    space: Mapping[str, Any] = field(default_factory=lambda: {"kind": "cosine"})
    pool: str = "none"
    output: str = ""
    prompts: Mapping[str, str] = field(default_factory=dict)

    def write(self, folder: Path, name: str) -> Card:
        space = space_from_json(dict(self.space))
        given = onnx_graph.with_one_output(read_model(self.path), self.output)
        _check_inputs(given)
        tokenizer, limit = _read_tokenizer(self.tokenizer, self.max_tokens)
        texts = probe_texts()
        query = self.prompts.get("query", "")
        raw = _run_one_by_one(given, tokenizer, [query + text for text in texts])
        if self.pool not in (legal := POOLS.get(raw[0].ndim, ())):
            raise InvalidArgument(
                f"--pool {self.pool} cannot be used: the model returns {raw[0].ndim} axes for (N, L) tokens; "
                f"legal: {', '.join(legal) or 'none, because no pooling gives (N, D)'}",
                pointer="/pool",
            )
        expected_ND = space.normalise(np.concatenate([_pooled(one, self.pool) for one in raw]))
        encoder = _with_pooling(_with_token_inputs(given), self.pool)
        encoder = onnx_graph.with_float_output(encoder, expected_ND.shape[1], unit=isinstance(space, Cosine))
        (folder / TEXT_ENCODER).parent.mkdir()
        (folder / TEXT_ENCODER).write_bytes(encoder.SerializeToString(deterministic=True))
        tokenizer.save(str(folder / TOKENIZER))
        write_text_probe(folder, texts[0], expected_ND[0].tolist())
        recipe = {"onnx": self.path.name, "sha256": sha256(self.path), "pool": self.pool, "output": self.output}
        card = Card(
            name,
            expected_ND.shape[1],
            space.as_json(),
            method="onnx",
            recipe={**recipe, "tokenizer": self.tokenizer.name, "max_tokens": limit},
            prompts=dict(self.prompts),
        )
        served = TextEncoder(Version(write_card(folder, card), folder))
        encoded = [served.encode(texts[row : row + BATCH]) for row in range(0, len(texts), BATCH)]
        parity = compare(np.concatenate(encoded), expected_ND, self.path.name, TEXT_ENCODER)
        return replace(card, metrics={"parity": {"texts": parity.as_json()}})


def _check_inputs(model: ModelProto) -> None:
    """Check the inputs of a model. Raises InvalidArgument."""
    given = {value.name: value for value in model.graph.input}
    if not {IDS, MASK} <= given.keys() <= {IDS, MASK, TYPES}:
        found = ", ".join(given) or "none"
        why = f"a model of texts must have the inputs {IDS} and {MASK}, and may have {TYPES}; it has: {found}"
        raise InvalidArgument(why, pointer="/onnx")
    for name, value in given.items():
        kind, sides = value.type.tensor_type.elem_type, onnx_graph.shape_of(value)
        if kind not in INTEGERS or sides != [None, None]:
            why = f"the input {name} must have shape (N, L), both free, of type int64 or int32, not {sides} of type "
            raise InvalidArgument(f"{why}{TensorProto.DataType.Name(kind).lower()}", pointer="/onnx")


def _read_tokenizer(path: Path, max_tokens: int | None) -> tuple[Tokenizer, int]:
    """The tokenizer, which cuts texts and pads them to the longest of a batch, and its limit in tokens.

    Raises:
        InvalidArgument: not a tokenizer, or the limit is missing or out of range.
    """
    try:
        with panics_as_errors():
            tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain `Exception`
        why = f"{path} must be a tokenizer.json of Hugging Face's tokenizers ({error})"
        raise InvalidArgument(why, pointer="/tokenizer") from error
    stated, padding = tokenizer.truncation or {}, tokenizer.padding or {}
    limit = max_tokens if max_tokens is not None else min(int(stated.get("max_length", 0)), MAX_TOKENS)
    if not 1 <= limit <= MAX_TOKENS:
        missing = "" if max_tokens is not None else f", and {path.name} does not say where it cuts texts"
        raise InvalidArgument(f"--max-tokens must be 1 to {MAX_TOKENS}{missing}", pointer="/max_tokens")
    tokenizer.enable_truncation(limit, direction=stated.get("direction", "right"))
    tokenizer.no_padding()
    if padding:  # of a fixed length in many files, which would only cost time
        named = {name: padding[name] for name in ("direction", "pad_id", "pad_token") if name in padding}
        tokenizer.enable_padding(**named)
    return tokenizer, limit


def _run_one_by_one(model: ModelProto, tokenizer: Tokenizer, texts: Sequence[str]) -> list[Vectors]:
    """The output of a model for each text alone, (1, ...).

    Raises:
        InvalidArgument: it fails, or its output is not finite or not of shape (1, ...).
    """
    run = onnx_graph.open_named_session(model)
    kinds = {value.name: INTEGERS[value.type.tensor_type.elem_type] for value in model.graph.input}
    rows = []
    for text in texts:
        ids_1L = np.array([tokenizer.encode(text).ids])
        inputs = {IDS: ids_1L, MASK: np.ones_like(ids_1L), TYPES: np.zeros_like(ids_1L)}
        rows.append(run({name: inputs[name].astype(kind) for name, kind in kinds.items()}))
    onnx_graph.check_rows(rows, "text")
    return rows


def _pooled(raw: Vectors, pool: str) -> Vectors:
    """The NumPy equivalent of `_with_pooling`, of a text without padding."""
    if pool == "none":
        return raw
    averaged: Vectors = raw[:, 0] if pool == "cls" else raw.mean(axis=1, dtype=np.float32)
    return averaged


def _with_token_inputs(model: ModelProto) -> ModelProto:
    """Change the inputs to int64 `input_ids` and `attention_mask`, as served."""
    kinds = {value.name: value.type.tensor_type.elem_type for value in model.graph.input}
    others = ("nodes", "edges", "outputs", "initializers", "value_infos", "functions")
    model = onnx.compose.add_prefix(model, PREFIX, **{f"rename_{other}": False for other in others})
    steps = [_node("Cast", [name], name, to=kinds[name]) for name in INPUTS]
    if TYPES in kinds:
        steps.append(_node("Sub", [IDS, IDS], "zeros"))
        steps.append(_node("Cast", [f"{PREFIX}zeros"], TYPES, to=kinds[TYPES]))
    for step in reversed(steps):
        model.graph.node.insert(0, step)
    del model.graph.input[:]
    model.graph.input.extend(helper.make_tensor_value_info(name, TensorProto.INT64, ("N", "L")) for name in INPUTS)
    return model


def _with_pooling(model: ModelProto, pool: str) -> ModelProto:
    """Pool the output (N, L, D) to (N, D): the first token, or the mean of the tokens that are no padding."""
    if pool == "none":
        return model
    last = model.graph.output[0].name
    shapes = {"first": 0, "across": (0, 1, -1), "down": (0, -1, 1)}
    for name, shape in shapes.items():
        model.graph.initializer.append(numpy_helper.from_array(np.array(shape, np.int64), PREFIX + name))
    if pool == "cls":
        return onnx_graph.ending(model, [_node("Gather", [last, f"{PREFIX}first"], "pooled", axis=1)])
    steps = [
        _node("Cast", [last], "tokens", to=TensorProto.FLOAT),
        _node("Cast", [MASK], "mask", to=TensorProto.FLOAT),
        _node("Reshape", [f"{PREFIX}mask", f"{PREFIX}across"], "row"),  # (N, 1, L)
        _node("Reshape", [f"{PREFIX}mask", f"{PREFIX}down"], "column"),  # (N, L, 1)
        _node("MatMul", [f"{PREFIX}row", f"{PREFIX}tokens"], "sum"),  # (N, 1, D)
        _node("MatMul", [f"{PREFIX}row", f"{PREFIX}column"], "count"),  # of ones and zeros: (N, 1, 1)
        _node("Div", [f"{PREFIX}sum", f"{PREFIX}count"], "mean"),
        _node("Flatten", [f"{PREFIX}mean"], "pooled", axis=1),
    ]
    return onnx_graph.ending(model, steps, TensorProto.FLOAT)


def _node(kind: str, inputs: Sequence[str], output: str, **attributes: int) -> Any:
    return helper.make_node(kind, inputs, [PREFIX + output], **attributes)
