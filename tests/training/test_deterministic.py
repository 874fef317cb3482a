"""No training step needs an operation that torch documents as raising under `deterministic=True` on CUDA."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from index.version import Preprocess
from training.determinism import RAISES, raising
from training.losses.losses import UNKNOWN
from training.method import EmbeddedBatch, OldSummary
from training.methods import METHODS
from training.networks.backbones import AverageGrid, build_backbone
from training.networks.heads import HEADS
from training.networks.side_information import KINDS
from training.recipes import RECIPES, Option, Recipe
from training.trained import build_method

CLASSES = 4


def test_the_list_is_what_torch_documents() -> None:
    told = (torch.use_deterministic_algorithms.__doc__ or "").partition("operations will throw a")[2]
    entries = re.split(r"\n\s+\* ", told.partition(".. note")[0])[1:]
    on_cuda = [entry for entry in entries if "MPS tensor" not in entry or "CUDA" in entry]
    named = {re.search(r"`torch\.([\w.]+)`", entry).group(1).rpartition(".")[2] for entry in on_cuda}

    assert named == set(RAISES)


def test_an_operation_of_the_list_is_noticed() -> None:
    image = torch.randn(2, 3, 4, 4, requires_grad=True)

    assert raising(lambda: nn.AdaptiveAvgPool2d(2)(image)) == {"_adaptive_avg_pool2d_backward"}


@pytest.mark.parametrize(
    ("backbone", "channels", "side"),
    sorted({(r.backbone, r.preprocess.channels, r.preprocess.height) for r in (make() for make in RECIPES.values())}),
)
def test_no_backbone_of_a_recipe_raises(backbone: str, channels: int, side: int) -> None:
    with torch.device("meta"):
        made, image = build_backbone(backbone, channels, 8), torch.randn(2, channels, side, side)

        assert raising(lambda: made(image)) == set()


FORMS: list[tuple[str, dict[str, Option]]] = [
    ("bct", {"influence": "distill"}),
    ("bct", {"alleviate": True}),
    ("hot_refresh", {"form": "triplet", "hardest": 2}),
    ("hbct", {"contrast": "info_nce"}),
]


@pytest.mark.parametrize(("name", "form"), [*((name, {}) for name in METHODS), *FORMS])
def test_no_method_raises(name: str, form: dict[str, Option]) -> None:
    space = "lorentz" if name == "hbct" else "cosine"
    dim, independent = {"oca": 10, "bt2": 16}.get(name, 8), {"bt2": 8}.get(name, 0)
    means = torch.randn(CLASSES, 8)
    head = torch.randn(2, 8), torch.randn(2)
    old = OldSummary(means, torch.tensor([0, 1, UNKNOWN, UNKNOWN]), *head, space, means, torch.ones(CLASSES))
    options = {"extra": 4} if name == "bt2" else form
    recipe = Recipe("test", method=name, dim=dim, space=space, head="lorentz_mlr" if name == "hbct" else "arcface")
    method = build_method(Recipe(**{**vars(recipe), "options": options}), CLASSES, old, independent)
    new = torch.randn(6, dim, requires_grad=True)
    batch = EmbeddedBatch(new, torch.arange(6) % CLASSES, torch.randn(6, 8), torch.randn(6, 8), 0.5)

    assert raising(lambda: method(batch).loss) == set()


@pytest.mark.parametrize("name", HEADS)
def test_no_head_raises(name: str) -> None:
    head, z_BD = HEADS[name](8, CLASSES), torch.randn(6, 8, requires_grad=True)
    label_B = torch.arange(6) % CLASSES

    assert raising(lambda: nn.functional.cross_entropy(head(z_BD, label_B), label_B, label_smoothing=0.1)) == set()


@pytest.mark.parametrize("kind", KINDS)
def test_no_objective_of_side_information_raises(kind: str) -> None:
    crops = 1 if kind == "simclr" else 0
    recipe = Recipe("test", dim=8, side=kind, side_crops=crops, augment="flip", preprocess=Preprocess(32, 32))
    objective, backbone = KINDS[kind](recipe, CLASSES), build_backbone("small_cnn_32", 3, 8)
    image_BCHW = torch.randn(objective.views * 2, 3, 32, 32)

    assert raising(lambda: objective(backbone, image_BCHW, torch.arange(len(image_BCHW)) % CLASSES)) == set()


@pytest.mark.parametrize("side", [1, 2, 3])
@pytest.mark.parametrize("size", [(4, 4), (6, 9), (7, 5), (3, 3)])
def test_the_grid_is_adaptive_average_pooling(side: int, size: tuple[int, int]) -> None:
    image = torch.randn(2, 3, *size, requires_grad=True)
    mine, torchs = AverageGrid(side)(image), nn.AdaptiveAvgPool2d(side)(image)

    torch.testing.assert_close(mine, torchs)
    weight = torch.randn_like(mine)
    gradients = [torch.autograd.grad((made * weight).sum(), image)[0] for made in (mine, torchs)]
    torch.testing.assert_close(*gradients)
