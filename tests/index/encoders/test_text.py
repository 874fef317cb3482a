"""index.encoders.text: a text entrance is held to its card and probe, and batches of texts embed as single texts do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from tokenizers import Tokenizer

from index.encoders.encoder import verify_version
from index.encoders.text import MAX_CHARACTERS, MAX_TOKENS, TextEncoder
from index.errors import InvalidText, InvalidVersionFolder, NoTextEntrance
from index.version import TEXT_ENCODER, TEXT_PROBE, TOKENIZER, Version
from staging.inputs.versions import change_model, rehash

AddText = Callable[..., Version]
WORDS = {"east": [1, 0], "north": [0, 1], "west": [-1, 0]}
HALF = 0.5**0.5


@pytest.fixture
def bare(tmp_path: Path, make_version: Callable[..., Version]) -> Version:
    return make_version(tmp_path / "v1", "v1", 2)


@pytest.fixture
def version(bare: Version, add_text: AddText) -> Version:
    return add_text(bare, {word: np.array(vector) for word, vector in WORDS.items()}, limit=6)


def change_tokenizer(version: Version, change: Callable[[Tokenizer], None]) -> Version:
    path = str(version.folder / TOKENIZER)
    tokenizer = Tokenizer.from_file(path)
    change(tokenizer)
    tokenizer.save(path)
    return rehash(version.folder)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("north", [0, 1]),
        ("east north", [HALF, HALF]),
        ("north  west", [-HALF, HALF]),
        ("east north north north", [10**-0.5, 3 * 10**-0.5]),
        ("east east east east east east west west west", [1, 0]),  # cut at six tokens
    ],
)
def test_texts_embed_as_computed_by_hand(version: Version, text: str, expected: list[float]) -> None:
    assert TextEncoder(version).encode([text])[0] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    "padding", [None, {}, {"direction": "left"}, {"length": 6}, {"pad_to_multiple_of": 4}], ids=str
)
def test_a_batch_embeds_as_its_texts_do_one_by_one(version: Version, padding: dict[str, Any] | None) -> None:
    if padding is not None:
        version = change_tokenizer(version, lambda tokenizer: tokenizer.enable_padding(pad_id=1, **padding))
    texts = ["east", "north west east", "west north north east somewhere", "west west east"]
    encoder = TextEncoder(version)

    together = encoder.encode(texts)

    assert together == pytest.approx(np.concatenate([encoder.encode([text]) for text in texts]), abs=1e-6)
    table = onnx.numpy_helper.to_array(onnx.load(version.folder / TEXT_ENCODER).graph.initializer[0])
    ids = {"east": 2, "north": 3, "west": 4}
    means = np.stack([table[[ids.get(word, 1) for word in text.split()]].mean(axis=0) for text in texts])
    assert together == pytest.approx(means / np.linalg.norm(means, axis=1, keepdims=True), abs=1e-6)


def test_texts_and_images_share_a_space(version: Version) -> None:
    assert verify_version(version.folder).card.text
    assert TextEncoder(version).encode(["east", "north"]).shape == (2, version.card.dim)


@pytest.mark.parametrize("text", ["", " \n\t", "\ud800", "a" * (MAX_CHARACTERS + 1), None, 7], ids=str)
def test_a_text_that_says_nothing_or_too_much_is_refused(version: Version, text: Any) -> None:
    with pytest.raises(InvalidText):
        TextEncoder(version).encode(["east", text])


def test_a_text_without_any_token_is_refused(version: Version) -> None:
    def drop_unknown(tokenizer: Tokenizer) -> None:
        tokenizer.model = type(tokenizer.model)({"east": 2, "north": 3, "west": 4, "<pad>": 0})

    encoder = TextEncoder(change_tokenizer(version, drop_unknown))

    with pytest.raises(InvalidText):
        encoder.encode(["somewhere"])


def test_a_version_without_text_entrance_says_so(bare: Version) -> None:
    assert not bare.card.text
    with pytest.raises(NoTextEntrance, match="'v1' has no text entrance"):
        TextEncoder(bare)


@pytest.mark.parametrize("missing", [TEXT_ENCODER, TEXT_PROBE, TOKENIZER])
def test_a_text_entrance_is_there_as_a_whole(version: Version, missing: str) -> None:
    (version.folder / missing).unlink()

    with pytest.raises(InvalidVersionFolder, match=f"{missing} is missing") as caught:
        rehash(version.folder)

    assert caught.value.pointer == f"/{missing}"


def test_what_is_no_part_of_a_text_entrance_is_named(version: Version) -> None:
    (version.folder / "text" / "vocab.txt").write_text("east")

    with pytest.raises(InvalidVersionFolder, match=r"text/vocab\.txt is not part"):
        rehash(version.folder)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\x00", b'{"version": "1.0", "model": 3}', b"[1, 2"])
def test_what_is_no_tokenizer_is_refused(version: Version, content: bytes) -> None:
    (version.folder / TOKENIZER).write_bytes(content)

    with pytest.raises(InvalidVersionFolder, match=r"text/tokenizer\.json is not a tokenizer"):
        TextEncoder(rehash(version.folder))


def test_a_tokenizer_that_panics_is_refused(version: Version) -> None:
    path = version.folder / TOKENIZER
    stated = json.loads(path.read_text())
    stated["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "[C]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [],
        "special_tokens": {},
    }
    path.write_text(json.dumps(stated))

    with pytest.raises(InvalidVersionFolder, match=r"text/probe\.json has a text that cannot be embedded"):
        TextEncoder(rehash(version.folder))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.no_truncation(), f"max_length of 1 to {MAX_TOKENS} tokens, not 0"),
        (lambda t: t.enable_truncation(MAX_TOKENS + 1), f"not {MAX_TOKENS + 1}"),
        (lambda t: t.enable_padding(length=9), "pads to 9 tokens but cuts at 6"),
        (lambda t: t.enable_padding(pad_to_multiple_of=1 << 30), "pads 6 tokens to 1073741824; at most"),
        (lambda t: t.enable_truncation(1), None),
    ],
)
def test_a_tokenizer_states_where_it_cuts(version: Version, change: Callable[[Tokenizer], None], message: str) -> None:
    changed = change_tokenizer(version, change)
    if message is None:
        assert TextEncoder(changed).encode(["north east"])[0] == pytest.approx([0, 1])
        return
    with pytest.raises(InvalidVersionFolder, match=message):
        TextEncoder(changed)


def rename_input(model: Any) -> None:
    model.graph.input[0].name = "tokens"
    model.graph.node[3].input[1] = "tokens"


def float_input(model: Any) -> None:
    model.graph.input[1].type.tensor_type.elem_type = onnx.TensorProto.FLOAT


def freeze_batch(model: Any) -> None:
    for declared in model.graph.input:
        declared.type.tensor_type.shape.dim[0].dim_value = 1


def three_sizes(model: Any) -> None:
    del model.graph.output[0].type.tensor_type.shape.dim[1]


def infinite(model: Any) -> None:
    table = onnx.numpy_helper.to_array(model.graph.initializer[0]).copy()
    table[2] = np.inf
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(table, "table"))


def short(model: Any) -> None:
    model.graph.node[-1].CopyFrom(helper.make_node("Identity", ["sum"], ["out"]))


def no_padding_known(model: Any) -> None:
    table = onnx.numpy_helper.to_array(model.graph.initializer[0]).copy()
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(table[:2], "table"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (rename_input, "needs the inputs input_ids and attention_mask of type tensor\\(int64\\), not tokens"),
        (float_input, "text/encoder\\.onnx"),
        (freeze_batch, "input input_ids has shape"),
        (three_sizes, "output has shape"),
        (infinite, "not finite"),
        (short, "not a unit vector|expects another"),
        (no_padding_known, "fails on a batch of 1"),
    ],
)
def test_a_model_of_another_kind_is_refused(version: Version, change: Callable[[Any], None], message: str) -> None:
    with pytest.raises(InvalidVersionFolder, match=message) as caught:
        verify_version(change_model(version.folder, TEXT_ENCODER, change).folder)

    assert caught.value.pointer in {f"/{TEXT_ENCODER}", f"/{TEXT_PROBE}"}


def test_a_model_of_another_width_is_refused(
    tmp_path: Path, version: Version, make_version: Callable[..., Version], add_text: AddText
) -> None:
    wider = add_text(make_version(tmp_path / "v3", "v3", 3), {"east": np.array([1, 0, 0])})
    (version.folder / TEXT_ENCODER).write_bytes((wider.folder / TEXT_ENCODER).read_bytes())

    with pytest.raises(InvalidVersionFolder, match=r"output has shape \['N', 3\]; the card says \(N, 2\)"):
        TextEncoder(rehash(version.folder))


def test_a_model_that_does_not_mind_its_mask_is_refused(bare: Version, add_text: AddText) -> None:
    words = {word: np.array(vector) for word, vector in WORDS.items()}
    version = add_text(bare, words, limit=6, probe="east north")

    def ignore_mask(model: Any) -> None:
        (power,) = (i for i in model.graph.initializer if i.name == "power")
        power.CopyFrom(onnx.numpy_helper.from_array(np.array(0, np.float32), "power"))

    with pytest.raises(InvalidVersionFolder, match="embeds the probe differently beside a longer text"):
        TextEncoder(change_model(version.folder, TEXT_ENCODER, ignore_mask))


@pytest.mark.parametrize(
    ("probe", "message"),
    [
        ("", "is not valid JSON"),
        ("[]", "must be a JSON object"),
        ('{"text": "east"}', "must be a JSON object"),
        ('{"text": "east", "embedding": ["a", "b"]}', "must be a JSON object"),
        ('{"text": "east", "embedding": [1]}', "list of 2 finite numbers"),
        ('{"text": "east", "embedding": [NaN, 1]}', "embedding/0 must be a finite number"),
        ('{"text": 5, "embedding": [1, 0]}', "must have a string"),
        ('{"text": "", "embedding": [1, 0]}', "has a text that cannot be embedded"),
        ('{"text": "north", "embedding": [1, 0]}', "expects another embedding: it differs by 1"),
    ],
)
def test_the_stored_probe_is_held(version: Version, probe: str, message: str) -> None:
    (version.folder / TEXT_PROBE).write_text(probe)

    with pytest.raises(InvalidVersionFolder, match=message):
        TextEncoder(rehash(version.folder))
