"""Versions of an ONNX model of texts: as served, it gives what the model gives for each text alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto
from tokenizers import Tokenizer

from index.creation.onnx_texts import OnnxTexts
from index.encoders.text import TextEncoder
from index.errors import RegraftError
from regraft import Version
from staging.inputs.text_models import TABLE, TOKENS, TYPE, write_model, write_tokenizer


def rows_of(text: str, start: bool = True) -> np.ndarray:
    """The plain twin: a row per token, of the first eight."""
    return TABLE[[TOKENS.index(token) for token in [*(["<s>"] if start else []), *text]][:8]]


TYPED = ("input_ids", "token_type_ids", "attention_mask")
CASES = {
    "mean": ({}, "mean", lambda rows: rows.mean(axis=0)),
    "pooled itself": ({"pooled": True}, "none", lambda rows: rows.max(axis=0)),
    "int32": ({"kind": TensorProto.INT32}, "mean", lambda rows: rows.mean(axis=0)),
    "token types": ({"inputs": TYPED}, "mean", lambda rows: rows.mean(axis=0) + TYPE[0]),
    "token types, int32": (
        {"inputs": TYPED, "kind": TensorProto.INT32},
        "mean",
        lambda rows: rows.mean(axis=0) + TYPE[0],
    ),
    "half": ({"made": TensorProto.FLOAT16}, "mean", lambda rows: rows.mean(axis=0)),
    "an old opset": ({"opset": 11}, "mean", lambda rows: rows.mean(axis=0)),
}


@pytest.mark.parametrize(("options", "pool", "plain"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("space", ["cosine", "l2"])
def test_texts_are_embedded_as_by_the_model_for_each_alone(
    tmp_path: Path, options: dict[str, Any], pool: str, plain: Any, space: str
) -> None:
    model = write_model(tmp_path / "m.onnx", **options)
    source = OnnxTexts(model, write_tokenizer(tmp_path / "t.json"), None, {"kind": space}, pool, "made")
    made = Version.create(tmp_path / "texts", source)
    texts = ["abc", "z", "abcdefghijk"]

    embedded = TextEncoder(made).encode(texts)

    expected = np.stack([plain(rows_of(text)) for text in texts])
    if space == "cosine":
        expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    assert embedded == pytest.approx(expected, abs=2e-3 if "made" in options else 1e-5)
    assert made.card.metrics["parity"]["texts"]["inputs"] == 100
    assert made.card.recipe["max_tokens"] == 8
    own = OnnxTexts(made.folder / "text/encoder.onnx", made.folder / "text/tokenizer.json", None, {"kind": space})
    assert TextEncoder(Version.create(tmp_path / "again", own)).encode(texts) == pytest.approx(embedded, abs=1e-5)


def test_the_first_token_is_an_embedding(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "t.json", start=False)
    source = OnnxTexts(write_model(tmp_path / "m.onnx"), tokenizer, None, {"kind": "l2"}, "cls", "made")

    embedded = TextEncoder(Version.create(tmp_path / "texts", source)).encode(["abc", "z"])

    assert embedded == pytest.approx(np.stack([rows_of("a", False)[0], rows_of("z", False)[0]]), abs=1e-5)


@pytest.mark.parametrize(
    ("options", "cut", "longest"),
    [({"cut": 8}, None, 8), ({"cut": 8}, 4, 4), ({"cut": None}, 5, 5), ({"cut": 8192}, None, 512)],
)
@pytest.mark.parametrize("padding", [{}, {"length": 8, "pad_id": 0, "pad_token": "<pad>", "direction": "left"}])
def test_texts_are_cut_and_padded_as_the_tokenizer_says(
    tmp_path: Path, options: dict[str, Any], cut: int | None, longest: int, padding: dict[str, Any]
) -> None:
    tokenizer = write_tokenizer(tmp_path / "t.json", **options, **padding)
    source = OnnxTexts(write_model(tmp_path / "m.onnx"), tokenizer, cut, pool="mean", output="made")

    made = Version.create(tmp_path / "texts", source)

    stored = Tokenizer.from_file(str(made.folder / "text/tokenizer.json"))
    assert (stored.truncation or {})["max_length"] == made.card.recipe["max_tokens"] == longest
    assert (stored.padding or {}).get("direction") == padding.get("direction")
    assert (stored.padding or {}).get("length") is None  # of a fixed one each text would cost the time of the longest


def test_prompts_are_put_before_texts(tmp_path: Path) -> None:
    model, tokenizer = write_model(tmp_path / "m.onnx"), write_tokenizer(tmp_path / "t.json")
    plain = OnnxTexts(model, tokenizer, pool="mean", output="made")
    asked = OnnxTexts(model, tokenizer, pool="mean", output="made", prompts={"query": "q", "item": "i"})

    made, bare = Version.create(tmp_path / "asked", asked), Version.create(tmp_path / "bare", plain)

    assert made.card.prompts == {"query": "q", "item": "i"}
    assert TextEncoder(made).encode(["ab"]) == pytest.approx(TextEncoder(bare).encode(["qab"]), abs=1e-5)


@pytest.mark.parametrize(
    ("options", "given", "pointer", "message"),
    [
        ({}, {"pool": "none"}, "/pool", "--pool none cannot be used: .* legal: mean, cls"),
        ({"pooled": True}, {"pool": "mean"}, "/pool", "--pool mean cannot be used: .* legal: none"),
        ({}, {"output": ""}, "/output", "must name one of the model's outputs: made, rows"),
        ({"shape": (1, "L")}, {}, "/onnx", r"input_ids must have shape \(N, L\), both free, .* not \[1, None\]"),
        ({"shape": ("N", 8)}, {}, "/onnx", r"not \[None, 8\] of type int64"),
        ({"inputs": (*TYPED, "position_ids")}, {}, "/onnx", "may have token_type_ids; it has: .*, position_ids"),
        ({"masked": False, "pooled": True}, {"pool": "none"}, "", "text/encoder.onnx differs from m.onnx by"),
        ({}, {"max_tokens": 513}, "/max_tokens", "--max-tokens must be 1 to 512"),
        ({}, {"cut": None}, "/max_tokens", "must be 1 to 512, and t.json does not say where it cuts texts"),
        ({}, {"tokenizer": "m.onnx"}, "/tokenizer", "m.onnx must be a tokenizer.json"),
    ],
)
def test_what_cannot_be_served_is_refused(
    tmp_path: Path, options: dict[str, Any], given: dict[str, Any], pointer: str, message: str
) -> None:
    model = write_model(tmp_path / "m.onnx", **options)
    given = {"pool": "mean", "output": "made", "tokenizer": "t.json", **given}
    write_tokenizer(tmp_path / "t.json", given.pop("cut", 8))

    with pytest.raises(RegraftError, match=message) as refused:
        Version.create(tmp_path / "texts", OnnxTexts(model, tmp_path / given.pop("tokenizer"), **given))

    assert refused.value.pointer == pointer
    assert not (tmp_path / "texts").exists()
