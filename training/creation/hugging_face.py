"""Versions of models that lie in a folder of Hugging Face's: sentence-transformers, or transformers.

A model of images and texts (CLIP, SigLIP) gets both entrances. Pooling, normalisation and prompts are what the folder
says. Shape suffixes: N inputs, C channels, H height, W width, L tokens, D dimension.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import shorten
from typing import Any

import sentence_transformers
import tokenizers
import torch
import transformers
from torch import Tensor, nn

from index.creation.preprocessing import from_hugging_face
from index.encoders.text import MAX_TOKENS
from index.errors import InvalidArgument, RegraftError
from index.space import Space, space_from_json
from index.version import Card
from training.creation.entrances import write_images, write_texts

CONFIG, MODULES = "config.json", "modules.json"
POOLS = ("cls", "mean")
WHOLE_LENGTH = ("siglip", "siglip2")
"""Trained on texts padded to the full length, without a mask: they are served so."""


@dataclass(frozen=True)
class HuggingFace:
    """A model in a folder, as `save_pretrained` or sentence-transformers' `save` wrote it; nothing is downloaded.

    Args:
        path: holds config.json, or modules.json of sentence-transformers.
        space: the `space` field of a card.
        pool: how a transformers model gives one embedding where no file says: `cls` or `mean`; None: images by the
            model's pooler, texts by the mean of the tokens, as sentence-transformers does.
    """

    path: Path
    space: Mapping[str, Any] = field(default_factory=lambda: {"kind": "cosine"})
    pool: str | None = None

    def write(self, folder: Path, name: str) -> Card:
        space = space_from_json(dict(self.space))
        if self.pool not in {None, *POOLS}:
            raise InvalidArgument(f"--pool {self.pool!r} is unknown; legal: {', '.join(POOLS)}", pointer="/pool")
        recipe = {"path": self.path.name, "pool": self.pool or ""}
        card = Card(name, 1, space.as_json(), recipe=recipe)
        with _readable(self.path):
            towers, sentences = self._towers()
        if self.pool is not None and (towers is not None or (self.path / MODULES).is_file()):
            raise InvalidArgument(
                f"--pool cannot be used with {self.path}, which defines its own pooling", pointer="/pool"
            )
        if towers is not None:
            return _write_towers(folder, towers, space, card)
        if sentences:
            return _write_sentences(folder, self.path, card, self.pool)
        return _write_vision(folder, self.path, space, card, self.pool)

    def _towers(self) -> tuple[Path | None, bool]:
        """The folder of a model of images and texts, or None; and whether it is one of texts alone."""
        parts = _read_json(self.path / MODULES) if (self.path / MODULES).is_file() else [{"path": ""}]
        first = self.path / parts[0]["path"]
        kind = transformers.AutoConfig.from_pretrained(first, local_files_only=True)
        if halves := [name for name in kind.architectures or () if name.endswith("WithProjection")]:
            raise InvalidArgument(
                f"{first} has only one half of a model of images and texts ({halves[0]}), without its "
                "projection: use the folder of the whole model",
                pointer="/hf",
            )
        model: Any = transformers.AutoModel._model_mapping[type(kind)]  # noqa: SLF001 - its class, without the weights
        both = hasattr(model, "get_image_features") and hasattr(model, "get_text_features")
        return (first if both else None), model.main_input_name == "input_ids"


class Pooled(nn.Module):
    """One tensor of what a method of a model gives: its pooled output, or its tokens, pooled."""

    def __init__(self, method: Any, pool: str | None) -> None:
        super().__init__()
        self.model = method.__self__
        self.name, self.pool = method.__name__, pool

    def forward(self, images: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, D)."""
        given = getattr(self.model, self.name)(pixel_values=images)
        if self.pool is not None:
            tokens_NLD: Tensor = given.last_hidden_state
            return tokens_NLD[:, 0] if self.pool == "cls" else tokens_NLD.mean(dim=1)
        pooled_ND: Tensor = getattr(given, "pooler_output", given)
        return pooled_ND.flatten(1)


class TextTower(nn.Module):
    """The texts of a model of images and texts."""

    def __init__(self, model: Any, *, masked: bool) -> None:
        super().__init__()
        self.model, self.masked = model, masked

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(N, L) twice -> (N, D)."""
        mask = {"attention_mask": attention_mask} if self.masked else {}
        given = self.model.get_text_features(input_ids=input_ids, **mask)
        embedding_ND: Tensor = getattr(given, "pooler_output", given)
        # An input that nothing reads would be left out of the ONNX model.
        return embedding_ND if self.masked else embedding_ND + 0 * attention_mask.sum(dim=1, keepdim=True)


class Sentences(nn.Module):
    """The modules of a sentence-transformers model."""

    def __init__(self, model: sentence_transformers.SentenceTransformer) -> None:
        super().__init__()
        parts: list[Any] = list(model)
        self.tokens = parts[0].auto_model
        self.rest = nn.ModuleList(parts[1:])
        self.dim: int | None = model.truncate_dim

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(N, L) twice -> (N, D)."""
        given = self.tokens(input_ids=input_ids, attention_mask=attention_mask)
        features: dict[str, Tensor] = {"token_embeddings": given.last_hidden_state, "attention_mask": attention_mask}
        for module in self.rest:
            features = module(features)
        return features["sentence_embedding"][:, : self.dim]


def _write_towers(folder: Path, path: Path, space: Space, card: Card) -> Card:
    with _readable(path):
        model = _model(path)
        images = _image_processor(path)
        words = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    whole = model.config.model_type in WHOLE_LENGTH
    limit = _limit(words, model, path)
    tower = TextTower(model, masked=not whole)
    card = _write_images(folder, Pooled(model.get_image_features, None), images, space, card)

    def embed(texts: list[str]) -> Tensor:
        padding = "max_length" if whole else True
        given = words(texts, padding=padding, truncation=True, max_length=limit, return_tensors="pt")
        made: Tensor = tower(given["input_ids"], given.get("attention_mask", given["input_ids"]))
        return made

    return _write_texts(folder, tower, words, limit, card, embed, whole=whole)


def _write_vision(folder: Path, path: Path, space: Space, card: Card, pool: str | None) -> Card:
    with _readable(path):
        model = _model(path, pool)
        images = _image_processor(path)
    return _write_images(folder, Pooled(model.forward, pool), images, space, card)


def _write_sentences(folder: Path, path: Path, card: Card, pool: str | None) -> Card:
    with _readable(path):
        model: Any = sentence_transformers.SentenceTransformer(str(path), device="cpu", local_files_only=True).float()
    if pool is not None:
        model[1].pooling_mode = pool
    limit = _limit(model.tokenizer, model[0].auto_model, path)
    model.max_seq_length = limit
    named = {"query": model.prompts.get("query"), "item": model.prompts.get("document")}
    card = replace(card, prompts={side: text for side, text in named.items() if text})
    if card.prompts and not getattr(model[1], "include_prompt", True):
        raise InvalidArgument(f"{path} excludes its prompts from the pooling, which is not supported", pointer="/hf")

    def embed(texts: list[str]) -> Tensor:
        made: Tensor = model.encode_query(texts, convert_to_tensor=True, show_progress_bar=False)
        return made.clone()

    source = f"sentence-transformers {sentence_transformers.__version__}"
    return _write_texts(folder, Sentences(model), model.tokenizer, limit, card, embed, source=source)


def _image_processor(path: Path) -> Any:
    """By Pillow, as serving works: transformers' other backend resizes tensors, which rounds otherwise."""
    processors: Any = transformers.AutoImageProcessor
    return processors.from_pretrained(path, local_files_only=True, backend="pil")


def _write_images(folder: Path, module: nn.Module, processor: Any, space: Space, card: Card) -> Card:
    spec = from_hugging_face(processor.to_dict())

    def reference(picture: Any) -> Tensor:
        pixels_CHW: Tensor = processor(images=picture, return_tensors="pt")["pixel_values"][0]
        return pixels_CHW

    source = _source()
    dim, parity = write_images(folder, module, spec, space, source, reference)
    return replace(
        card,
        dim=dim,
        preprocess=spec,
        method="transformers",
        recipe={**card.recipe, "source": source},
        metrics={"parity": {"images": parity.as_json()}},
    )


def _write_texts(
    folder: Path,
    module: nn.Module,
    words: Any,
    limit: int,
    card: Card,
    embed: Any,
    *,
    whole: bool = False,
    source: str = "",
) -> Card:
    """Write the text entrance beside what is there; the dimension is that of the images, if there are any."""
    source = source or _source()
    with torch.inference_mode():
        dim = embed(["a"]).shape[1]
    card = replace(
        card, dim=dim, method=source.partition(" ")[0], recipe={**card.recipe, "source": source, "max_tokens": limit}
    )
    tokenizer = tokenizers.Tokenizer.from_str(words.backend_tokenizer.to_str())
    tokenizer.enable_truncation(limit)
    tokenizer.enable_padding(
        direction=words.padding_side,
        pad_id=words.pad_token_id,
        pad_token=words.pad_token,
        length=limit if whole else None,
    )
    parity = write_texts(folder, module, tokenizer, card, source, embed)
    told = {**card.metrics.get("parity", {}), "texts": parity.as_json()}
    return replace(card, metrics={"parity": told})


def _model(path: Path, pool: str | None = None) -> Any:
    """The model, every weight of it from the folder; with a `pool` its own pooler may lack."""
    model, told = transformers.AutoModel.from_pretrained(
        path, local_files_only=True, output_loading_info=True, dtype=torch.float32
    )
    missing = [key for key in sorted(told["missing_keys"]) if pool is None or "pooler" not in key]
    if missing:
        raise InvalidArgument(
            f"{path} has no weights for parts of its model, such as {missing[0]}; if that is the pooler, set --pool "
            f"{' or '.join(POOLS)}",
            pointer="/hf",
        )
    return model.eval()


def _limit(words: Any, model: Any, path: Path) -> int:
    """Tokens that a text is cut at: what the tokenizer and the model say, at most what serving takes.

    Raises:
        InvalidArgument: serving cannot use the tokenizer.
    """
    if not hasattr(words, "backend_tokenizer"):
        why = f"{path} has a tokenizer that cannot be written as tokenizer.json ({type(words).__name__})"
        raise InvalidArgument(why, pointer="/hf")
    if words.pad_token is None:
        raise InvalidArgument(
            f"the tokenizer of {path} has no pad_token, which batches of texts require", pointer="/hf"
        )
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", MAX_TOKENS)
    for name, part in model.named_modules():
        if name.endswith("position_embeddings") and getattr(part, "padding_idx", None) is not None:
            positions -= part.padding_idx + 1  # RoBERTa and its like count from behind their padding
    return int(min(words.model_max_length, positions, MAX_TOKENS))


def _source() -> str:
    return f"transformers {transformers.__version__}"


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text())


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn what reading a model raises into one sentence."""
    try:
        yield
    except RegraftError:
        raise
    except Exception as error:  # whatever a missing or wrong file leads these libraries to
        if not (path / CONFIG).is_file() and not (path / MODULES).is_file():
            raise InvalidArgument(f"--hf {path} must be a folder with {CONFIG} or {MODULES}", pointer="/hf") from error
        why = shorten(str(error), 300)
        raise InvalidArgument(f"{path} cannot be read as a model: {why}", pointer="/hf") from error
