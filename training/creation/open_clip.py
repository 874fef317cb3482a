"""Versions of models of open_clip: images and texts, with the tokenizer of CLIP.

Shape suffixes: N inputs, C channels, H height, W width, L tokens, D dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import shorten
from typing import Any

import open_clip
from open_clip.tokenizer import SimpleTokenizer
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn

from index.errors import InvalidArgument, RegraftError
from index.space import space_from_json
from index.version import Card, Preprocess
from training.creation.entrances import write_images, write_texts

CONFIG = "open_clip_config.json"
WORDS = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
"""What CLIP's tokenizer takes for a word, of a text in lower case."""
REPAIRED = {
    "[\u02bc\u2018-\u201b]": "'",
    "[\u201c-\u201f]": '"',
    "\ufb00": "ff",
    "\ufb01": "fi",
    "\ufb02": "fl",
    "\ufb03": "ffi",
    "\ufb04": "ffl",
}
"""What ftfy makes of curly quotes and ligatures, which telephones and typeset documents put into texts."""
START, END = "<start_of_text>", "<end_of_text>"


@dataclass(frozen=True)
class OpenClip:
    """A model of open_clip: by its name with a file of weights, or in a folder that holds open_clip_config.json.

    Nothing is downloaded. Of what open_clip repairs in a text before it reads it, curly quotes and ligatures are
    repaired; the rest (ftfy: broken encodings, full-width letters; HTML entities) stays as it is.

    Args:
        model: a name as `open_clip.list_models()` has it, or the folder.
        weights: the file, for a name.
        space: the `space` field of a card.
    """

    model: str
    weights: Path | None = None
    space: Mapping[str, Any] = field(default_factory=lambda: {"kind": "cosine"})

    def write(self, folder: Path, name: str) -> Card:
        space = space_from_json(dict(self.space))
        with _readable(self.model):
            model, prepare, words = self._opened()
        if not isinstance(words, SimpleTokenizer) or words.reduction_fn is not None:
            raise InvalidArgument(
                f"{self.model} has its own tokenizer ({type(words).__name__}), but only CLIP's is supported: if its "
                "folder is a Hugging Face folder, use --hf",
                pointer="/open_clip",
            )
        spec = _preprocess(model.visual.preprocess_cfg)
        source = f"open_clip {open_clip.__version__}"
        dim, images = write_images(folder, ImageTower(model), spec, space, source, prepare)
        limit = int(words.context_length or model.context_length)
        recipe = {"open_clip": Path(self.model).name, "source": source, "max_tokens": limit}
        card = Card(name, dim, space.as_json(), spec, method="open_clip", recipe=recipe)

        def embed(texts: list[str]) -> Tensor:
            made: Tensor = model.encode_text(words(texts))
            return made

        texts = write_texts(folder, WholeTexts(model), _tokenizer(words, limit), card, source, embed)
        return replace(card, metrics={"parity": {"images": images.as_json(), "texts": texts.as_json()}})

    def _opened(self) -> tuple[Any, Any, Any]:
        """The model, how it prepares an image, and its tokenizer."""
        place = Path(self.model)
        local = (place / CONFIG).is_file()
        if not local and (self.model not in open_clip.list_models() or self.weights is None):
            raise InvalidArgument(
                f"--open-clip {self.model} must be a folder with {CONFIG}, or a known name with --weights FILE",
                pointer="/open_clip",
            )
        named = f"local-dir:{place}" if local else self.model
        pretrained = None if local else str(self.weights)
        model, _, prepare = open_clip.create_model_and_transforms(named, pretrained=pretrained)
        return model.eval().requires_grad_(False), prepare, open_clip.get_tokenizer(named)


class ImageTower(nn.Module):
    """The images of a model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, D)."""
        embedding_ND: Tensor = self.model.encode_image(images)
        return embedding_ND


class WholeTexts(nn.Module):
    """The texts of a model, which reads them padded to the full length and without a mask."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(N, L) twice -> (N, D)."""
        embedding_ND: Tensor = self.model.encode_text(input_ids)
        # An input that nothing reads would be left out of the ONNX model.
        return embedding_ND + 0 * attention_mask.sum(dim=1, keepdim=True)


def _preprocess(config: Mapping[str, Any]) -> Preprocess:
    """What open_clip's transform does outside training. Raises InvalidArgument where it cannot be said exactly."""
    size = config["size"]
    height, width = (size, size) if isinstance(size, int) else size
    mode = config.get("resize_mode") or "shortest"
    if mode not in {"shortest", "squash"} or (mode == "shortest" and height != width):
        raise InvalidArgument(
            f"resize_mode {mode!r} of {height} x {width} pixels is not supported exactly; legal: squash, shortest of a "
            "square",
            pointer="/preprocess",
        )
    return Preprocess(
        height=height,
        width=width,
        resize=height if mode == "shortest" else None,
        stretch=mode == "squash",
        interpolation=config.get("interpolation") or "bicubic",
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
    )


def _tokenizer(words: SimpleTokenizer, limit: int) -> Tokenizer:
    """CLIP's tokenizer as one of Hugging Face's, which pads to the full length."""
    made = Tokenizer(models.BPE(words.encoder, list(words.bpe_ranks), end_of_word_suffix="</w>"))
    made.normalizer = normalizers.Sequence(
        [
            *(normalizers.Replace(Regex(found), repaired) for found, repaired in REPAIRED.items()),
            normalizers.NFC(),
            normalizers.Replace(Regex(r"\s+"), " "),
            normalizers.Strip(),
            normalizers.Lowercase(),
        ]
    )
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.add_special_tokens([START, END])
    ends = [(START, words.sot_token_id), (END, words.eot_token_id)]
    made.post_processor = processors.TemplateProcessing(single=f"{START} $A {END}", special_tokens=ends)
    made.enable_truncation(limit)
    made.enable_padding(pad_id=0, length=limit)
    return made


@contextmanager
def _readable(model: str) -> Iterator[None]:
    """Turn what reading a model raises into one sentence."""
    try:
        yield
    except RegraftError:
        raise
    except Exception as error:  # whatever a wrong file leads the library to
        why = shorten(str(error), 300)
        raise InvalidArgument(f"{model} cannot be read as an open_clip model: {why}", pointer="/open_clip") from error
