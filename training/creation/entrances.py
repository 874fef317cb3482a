"""From a module of torch to an entrance of a version folder, compared with the library that the module is from.

Shape suffixes: N inputs, C channels, H height, W width, L tokens, D dimension.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from textwrap import shorten

import numpy as np
import onnxruntime as ort
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from tokenizers import Tokenizer
from torch import Tensor, nn

from index.creation.probes import (
    Parity,
    compare,
    probe_files,
    probe_texts,
    write_image_probe,
    write_text_probe,
)
from index.encoders.image import Pixels, decode_image, preprocess_batch
from index.encoders.text import INPUTS, TextEncoder
from index.errors import InvalidArgument, raise_if_out_of_memory
from index.space import Cosine, Space, Vectors, space_from_json
from index.version import ENCODER, TEXT_ENCODER, TOKENIZER, Card, Preprocess, Version
from index.version_folder.folder import write_card
from training.tracing import to_onnx

MAX_BYTES = 1 << 31
BATCH = 10
"""Probes in one run."""

PrepareImage = Callable[[Image.Image], Tensor]
"""How the library that a model is from prepares an image: to (C, H, W)."""
Embed = Callable[[list[str]], Tensor]
"""How it embeds texts: to (N, D)."""


class Images(nn.Module):
    """A module's embeddings of images, of length 1 if `unit`."""

    def __init__(self, module: nn.Module, *, unit: bool) -> None:
        super().__init__()
        self.module, self.unit = module, unit

    def forward(self, images: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, D), ready to compare."""
        embedding_ND: Tensor = self.module(images)
        return F.normalize(embedding_ND) if self.unit else embedding_ND


class Texts(nn.Module):
    """A module's embeddings of texts, of length 1 if `unit`."""

    def __init__(self, module: nn.Module, *, unit: bool) -> None:
        super().__init__()
        self.module, self.unit = module, unit

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(N, L) twice -> (N, D), ready to compare."""
        embedding_ND: Tensor = self.module(input_ids, attention_mask)
        return F.normalize(embedding_ND) if self.unit else embedding_ND


def write_images(
    folder: Path, module: nn.Module, spec: Preprocess, space: Space, source: str, reference: PrepareImage | None = None
) -> tuple[int, Parity]:
    """Write encoder.onnx and probe.npz, and hold them against the source on the probe images.

    Args:
        folder: where to.
        module: (N, C, H, W) -> (N, D).
        spec: how images become its input.
        space: what its embeddings lie in.
        source: what messages and the card call the library.
        reference: how the library prepares an image; None: there is none, `spec` is all that is known.

    Returns:
        D, and how far they are apart.

    Raises:
        ParityError: too far.
    """
    encoder = Images(module, unit=isinstance(space, Cosine)).eval().requires_grad_(False)
    files = probe_files()
    pixels_NCHW = preprocess_batch([decode_image(data) for data in files], spec)
    given = {"images": torch.from_numpy(pixels_NCHW[:1])}
    (folder / ENCODER).write_bytes(_exported(encoder, given, "image_embedding", source))
    session = ort.InferenceSession((folder / ENCODER).read_bytes(), providers=["CPUExecutionProvider"])
    made_ND = np.concatenate([session.run(None, {"images": part})[0] for part in _batches(pixels_NCHW)])
    theirs_NCHW = pixels_NCHW
    if reference is not None:
        theirs_NCHW = np.stack([reference(_opened(data, spec.mode)).numpy() for data in files])
    with torch.inference_mode():
        theirs_ND = torch.cat([encoder(torch.from_numpy(part)) for part in _batches(theirs_NCHW)]).numpy()
    parity = compare(made_ND, theirs_ND, source, ENCODER)
    write_image_probe(folder, pixels_NCHW[:1], made_ND[:1])
    return made_ND.shape[1], parity


def write_texts(
    folder: Path, module: nn.Module, tokenizer: Tokenizer, card: Card, source: str, reference: Embed
) -> Parity:
    """Write the files of text/, and hold what serving makes of them against the source on the probe texts.

    Args:
        folder: where to; the other entrance, if there is one, is there.
        module: int64 `input_ids` and `attention_mask` (N, L) -> (N, D).
        tokenizer: states its truncation and padding.
        card: of the version; its prompts and space are heeded.
        source: what messages and the card call the library.
        reference: how the library embeds queries, prompt and all: to (N, D), of length 1 or not.

    Raises:
        ParityError: too far apart.
    """
    unit = isinstance(space_from_json(dict(card.space)), Cosine)
    encoder = Texts(module, unit=unit).eval().requires_grad_(False)
    texts = probe_texts()
    (folder / TOKENIZER).parent.mkdir()
    tokenizer.save(str(folder / TOKENIZER))
    ids_1L = torch.tensor([tokenizer.encode(card.prompts.get("query", "") + texts[0]).ids])
    given = dict(zip(INPUTS, (ids_1L, torch.ones_like(ids_1L)), strict=True))
    (folder / TEXT_ENCODER).write_bytes(_exported(encoder, given, "text_embedding", source, second=True))
    with torch.inference_mode():
        write_text_probe(folder, texts[0], encoder(*given.values())[0].numpy())
        theirs_ND = reference(texts)
    served = TextEncoder(Version(write_card(folder, card), folder))
    made_ND = np.concatenate([served.encode(texts[row : row + BATCH]) for row in range(0, len(texts), BATCH)])
    if unit:
        theirs_ND = F.normalize(theirs_ND)
    return compare(made_ND, theirs_ND.numpy(), source, TEXT_ENCODER)


def _exported(
    encoder: nn.Module, given: Mapping[str, Tensor], made: str, source: str, *, second: bool = False
) -> bytes:
    """The module as an ONNX model.

    Raises:
        InvalidArgument: it is too large for one, cannot be traced, or gives something else than (N, D).
    """
    taken = sum(x.numel() * x.element_size() for x in encoder.parameters())
    if taken >= MAX_BYTES:
        raise InvalidArgument(f"the model of {source} has {taken} bytes; an ONNX file must have less than {MAX_BYTES}")
    try:
        with torch.inference_mode():
            shape = tuple(encoder(*given.values()).shape)
        content = to_onnx(encoder, given, [made], second=second) if len(shape) == 2 else b""
    except Exception as error:  # a module may do anything, and tracing it end anyhow
        raise_if_out_of_memory(error)
        why = shorten(str(error), 300)
        raise InvalidArgument(f"the model of {source} cannot be written as an ONNX model: {why}") from error
    if not content:
        raise InvalidArgument(f"the model of {source} returns shape {shape} for one input, not (1, D)")
    return content


def _batches(array_N: Pixels) -> Iterator[Vectors]:
    for start in range(0, len(array_N), BATCH):
        yield array_N[start : start + BATCH]


def _opened(data: bytes, mode: str) -> Image.Image:
    """A file as a user of the library opens it: upright, and in its model's colours."""
    return ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert(mode)
