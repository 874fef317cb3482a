"""Versions of open_clip's models: a small random one, held against the library."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from index.creation.probes import PROBES, SENTENCES
from index.encoders.encoder import Encoder, verify_version
from index.encoders.text import TextEncoder
from index.errors import InvalidArgument
from regraft import Version
from staging.inputs.builders import make_image

open_clip = pytest.importorskip("open_clip", reason="regraft[open-clip] is not installed")

from training.creation.open_clip import OpenClip  # noqa: E402 - it needs open_clip

TYPESET = "the dog\u2019s \u201cred\u201d ball \u2018of\u2019 its o\ufb03ce, \ufb01ne \ufb02ax and stu\ufb00"
MODEL = {
    "embed_dim": 16,
    "vision_cfg": {"layers": 1, "width": 32, "head_width": 16, "patch_size": 8, "image_size": 32},
    "text_cfg": {"context_length": 24, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
}


def folder(place: Path, resize_mode: str = "shortest") -> Path:
    """A model's folder, as open_clip pushes one."""
    place.mkdir()
    torch.manual_seed(0)
    model = open_clip.CLIP(**MODEL)
    torch.save(model.state_dict(), place / "open_clip_pytorch_model.bin")
    config = {"model_cfg": MODEL, "preprocess_cfg": {"size": 32, "resize_mode": resize_mode}}
    (place / "open_clip_config.json").write_text(json.dumps(config))
    return place


@pytest.mark.parametrize("resize_mode", ["shortest", pytest.param("squash", marks=pytest.mark.slow)])
def test_a_model_becomes_a_version_that_gives_what_open_clip_gives(tmp_path: Path, resize_mode: str) -> None:
    place = folder(tmp_path / "model", resize_mode)

    made = Version.create(tmp_path / "mine", OpenClip(str(place)))

    verify_version(made.folder, batches=True)
    for parity in made.card.metrics["parity"].values():
        assert (parity["inputs"], parity["largest_difference"] < 1e-3) == (PROBES, True)
    model, _, prepare = open_clip.create_model_and_transforms(f"local-dir:{place}")
    words = open_clip.get_tokenizer(f"local-dir:{place}")
    images, texts = [make_image(n, n).convert("RGB").resize((50 + n, 40)) for n in range(3)], [*SENTENCES, TYPESET]
    with torch.inference_mode():
        by_images = model.eval().encode_image(torch.stack([prepare(image) for image in images]), normalize=True)
        by_texts = model.encode_text(words(texts), normalize=True)
    np.testing.assert_allclose(Encoder(made).encode(images).vectors, by_images.numpy(), atol=1e-4)
    np.testing.assert_allclose(TextEncoder(made).encode(texts), by_texts.numpy(), atol=1e-4)


def test_what_is_no_model_is_said(tmp_path: Path) -> None:
    place = folder(tmp_path / "model", "longest")
    for model, told in ((str(place), "longest"), (str(tmp_path), "open_clip_config.json"), ("ViT-B-32", "--weights")):
        with pytest.raises(InvalidArgument, match=told):
            Version.create(tmp_path / "mine", OpenClip(model))
    (place / "open_clip_pytorch_model.bin").write_bytes(b"nothing")
    with pytest.raises(InvalidArgument, match="cannot be read"):
        Version.create(tmp_path / "mine", OpenClip(str(place)))
    assert not (tmp_path / "mine").exists()
