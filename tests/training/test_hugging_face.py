"""Versions of Hugging Face's folders: small random models by the libraries' own classes, held against the libraries."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from index.creation.probes import PROBES, SENTENCES
from index.encoders.encoder import Encoder, verify_version
from index.encoders.text import TextEncoder
from index.errors import InvalidArgument
from regraft import Version

pytest.importorskip("transformers", reason="regraft[models] is not installed")
pytest.importorskip("sentence_transformers", reason="regraft[models] is not installed")

import sentence_transformers
import transformers

from staging.inputs import hugging_face
from staging.inputs.hugging_face import LIMIT, bert, clip, roberta, sentences, siglip, vit
from training.creation.hugging_face import HuggingFace


@pytest.fixture(scope="module")
def words() -> transformers.PreTrainedTokenizerFast:
    return hugging_face.words()


@pytest.fixture(scope="module")
def created(
    words: transformers.PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Path, Version]]:
    """The folder of a model, and the version that is made of it; once for each."""

    @functools.cache
    def make(build: Callable[..., Path], pool: str | None = None) -> tuple[Path, Version]:
        place = tmp_path_factory.mktemp("created")
        folder = build(place / "model", words)
        return folder, Version.create(place / "mine", HuggingFace(folder, pool=pool))

    return make


@pytest.mark.parametrize(
    ("build", "pool", "entrances"),
    [
        pytest.param(sentences, None, {"texts"}, marks=pytest.mark.slow),
        pytest.param(bert, "cls", {"texts"}, marks=pytest.mark.slow),
        (clip, None, {"images", "texts"}),
        pytest.param(siglip, None, {"images", "texts"}, marks=pytest.mark.slow),
        pytest.param(vit, None, {"images"}, marks=pytest.mark.slow),
        pytest.param(vit, "mean", {"images"}, marks=pytest.mark.slow),
    ],
)
def test_a_folder_becomes_a_version_that_gives_what_its_library_gives(
    build: Callable[..., Path], pool: str | None, entrances: set[str], created: Callable[..., tuple[Path, Version]]
) -> None:
    _, made = created(build, pool)

    assert verify_version(made.folder, {}).name == "mine"
    assert {name for name, there in (("images", made.card.encoder), ("texts", made.card.text)) if there} == entrances
    assert set(made.card.metrics["parity"]) == entrances
    for parity in made.card.metrics["parity"].values():
        assert (parity["inputs"], parity["largest_difference"] < 1e-4) == (PROBES, True)


@pytest.mark.slow
def test_queries_are_embedded_with_the_models_own_prompt(created: Callable[..., tuple[Path, Version]]) -> None:
    folder, made = created(sentences)

    model = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    assert made.card.prompts == {"query": "query: ", "item": "passage: "}
    expected = model.encode([f"query: {text}" for text in SENTENCES])
    np.testing.assert_allclose(TextEncoder(made).encode(SENTENCES), expected, atol=1e-5)


@pytest.mark.slow
def test_both_entrances_of_clip_lead_to_its_own_space(
    created: Callable[..., tuple[Path, Version]], words: transformers.PreTrainedTokenizerFast, make_image
) -> None:
    folder, made = created(clip)

    model = transformers.CLIPModel.from_pretrained(folder)
    picture = make_image(1).resize((37, 53)).convert("RGB")
    pixels = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")(images=picture, return_tensors="pt")
    with torch.inference_mode():
        given = model(**words(["a cat"], return_tensors="pt", return_token_type_ids=False), **pixels)
    np.testing.assert_allclose(TextEncoder(made).encode(["a cat"]), given.text_embeds.numpy(), atol=1e-5)
    np.testing.assert_allclose(Encoder(made).encode([picture]).vectors, given.image_embeds.numpy(), atol=1e-5)
    assert made.card.preprocess is not None
    assert made.card.preprocess.crop == "floor"


@pytest.mark.slow
def test_texts_are_cut_before_a_models_positions_end(created: Callable[..., tuple[Path, Version]]) -> None:
    _, made = created(roberta)

    assert made.card.recipe["max_tokens"] == LIMIT
    assert made.card.metrics["parity"]["texts"]["largest_difference"] < 1e-4


def shortened(folder: Path, words: transformers.PreTrainedTokenizerFast) -> Path:
    return sentences(folder, words, truncate_dim=5)


@pytest.mark.slow
def test_embeddings_that_a_model_shortens_are_shortened(created: Callable[..., tuple[Path, Version]]) -> None:
    folder, made = created(shortened)

    expected = sentence_transformers.SentenceTransformer(str(folder), device="cpu").encode_query(SENTENCES)
    assert made.card.dim == 5
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(TextEncoder(made).encode(SENTENCES), expected, atol=1e-5)


def of_half_precision(folder: Path, words: transformers.PreTrainedTokenizerFast) -> Path:
    transformers.AutoModel.from_pretrained(bert(folder, words), dtype=torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_texts_of_a_model_in_half_precision_are_embedded_in_float32(
    created: Callable[..., tuple[Path, Version]],
) -> None:
    _, made = created(of_half_precision)

    assert made.card.metrics["parity"]["texts"]["largest_difference"] < 1e-4
    assert TextEncoder(made).encode(SENTENCES).dtype == np.float32


def unpadded(folder: Path, words: transformers.PreTrainedTokenizerFast) -> Path:
    """As GPT-2: batches of texts need a token that the tokenizer lacks."""
    bert(folder, words)
    transformers.PreTrainedTokenizerFast(tokenizer_object=words.backend_tokenizer).save_pretrained(folder)
    return folder


def of_bytes(folder: Path, words: transformers.PreTrainedTokenizerFast) -> Path:
    bert(folder, words)
    (folder / "tokenizer.json").unlink()
    transformers.ByT5Tokenizer().save_pretrained(folder)
    return folder


def half(folder: Path, words: transformers.PreTrainedTokenizerFast) -> Path:
    """The images of `clip`, by the class that transformers has for them alone."""
    whole = transformers.CLIPModel.from_pretrained(clip(folder, words))
    transformers.CLIPVisionModelWithProjection(whole.config.vision_config).save_pretrained(folder)
    return folder


def without(folder: Path, name: str) -> Path:
    (folder / name).unlink()
    return folder


def poolerless(folder: Path, words: transformers.PreTrainedTokenizerFast) -> Path:
    from safetensors.torch import load_file, save_file

    weights = load_file(vit(folder, words) / "model.safetensors")
    kept = {name: x for name, x in weights.items() if "pooler" not in name}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("build", "pool", "message"),
    [
        (lambda folder, words: folder, None, r"--hf .*model must be a folder with config.json or modules.json"),
        (lambda folder, words: without(vit(folder, words), "model.safetensors"), None, "cannot be read as a model"),
        (
            lambda folder, words: without(vit(folder, words), "preprocessor_config.json"),
            None,
            "cannot be read as a model",
        ),
        (poolerless, None, r"has no weights for parts of its model, such as pooler.*, set --pool cls or mean"),
        (half, None, r"one half of a model of images and texts \(CLIPVisionModelWithProjection\)"),
        (unpadded, None, r"tokenizer of .*model has no pad_token"),
        (of_bytes, None, r"model has a tokenizer that cannot be written as tokenizer.json \(ByT5Tokenizer\)"),
        (vit, "max", "--pool 'max' is unknown; legal: cls, mean"),
        (clip, "cls", "--pool cannot be used with .*, which defines its own pooling"),
        (sentences, "cls", "--pool cannot be used with .*, which defines its own pooling"),
    ],
)
def test_what_cannot_be_read_is_named(
    build, pool: str | None, message: str, words: transformers.PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    folder = build(tmp_path / "model", words)

    with pytest.raises(InvalidArgument, match=message):
        Version.create(tmp_path / "versions" / "mine", HuggingFace(folder, pool=pool))
    assert not (tmp_path / "versions/mine").exists()


@pytest.mark.slow
def test_a_model_without_its_own_pooler_is_pooled_as_asked(
    words: transformers.PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    made = Version.create(tmp_path / "mine", HuggingFace(poolerless(tmp_path / "model", words), pool="cls"))

    assert json.loads((made.folder / "card.json").read_text())["recipe"]["pool"] == "cls"
