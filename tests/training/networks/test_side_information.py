"""Side-information: what each kind learns by, against plain twins, and what psi and g make of raw numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from index.errors import InvalidArgument
from tensors import draw
from training.data.batching import training_batches
from training.losses.contrasts import nt_xent
from training.method import Classifier
from training.module import BaseTraining
from training.networks.heads import Softmax
from training.networks.side_information import (
    NONE,
    Alternate,
    Autoencoder,
    Psi,
    SimClr,
    build_psi,
    check_side,
    dim_of,
    finished,
    is_stable,
    recipe_of_psi,
)
from training.recipes import Recipe, find_recipe
from training.sources import load_data


def sided(**changes: object) -> Recipe:
    return replace(find_recipe("digits_v1_side"), **changes)


def test_simclr_pulls_the_two_views_of_an_image_together() -> None:
    torch.manual_seed(0)
    objective, image_VD = SimClr(3, 0.5), draw(8, 3)
    made = objective(nn.Identity(), image_VD, torch.zeros(8, dtype=torch.long)).item()

    unit = F.normalize(objective.project(image_VD)).double().detach().numpy()
    losses = []
    for row in range(8):
        near = {other: np.exp(unit[row] @ unit[other] / 0.5) for other in range(8) if other != row}
        losses.append(-np.log(near[(row + 4) % 8] / sum(near.values())))
    assert made == pytest.approx(np.mean(losses), rel=1e-5)


def test_further_crops_are_compared_with_both_whole_views() -> None:
    torch.manual_seed(0)
    objective, image_VCHW = SimClr(3, 0.5, crops=2), draw(16, 3, 4, 4)
    seen: list[torch.Tensor] = []

    def backbone(images: torch.Tensor) -> torch.Tensor:
        seen.append(images)
        return images.mean((2, 3))

    made = objective(backbone, image_VCHW, torch.zeros(16, dtype=torch.long))
    views = objective.project(seen[0].mean((2, 3))).chunk(4)

    assert objective.views == 4
    assert torch.equal(seen[0][:8], image_VCHW[:8])
    assert not torch.isclose(seen[0][8:], image_VCHW[8:]).flatten(1).all(1).any()
    pairs = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
    torch.testing.assert_close(made, sum(nt_xent(views[a], views[b], 0.5) for a, b in pairs) / 5)


def test_the_autoencoder_sees_nothing_but_psi_of_an_image() -> None:
    torch.manual_seed(0)
    objective, image_BCHW = Autoencoder(4, 3, 10, 12).eval(), draw(5, 3, 10, 12)
    constant = nn.Sequential(nn.Flatten(), nn.Linear(360, 4))
    nn.init.zeros_(constant.get_parameter("1.weight"))
    painted = objective.paint(F.interpolate(objective.decode(F.normalize(constant(image_BCHW))), (10, 12)))

    expected = ((painted - image_BCHW) ** 2).mean()
    torch.testing.assert_close(objective(constant, image_BCHW, torch.zeros(5)), expected)
    torch.testing.assert_close(painted[0], painted[1])  # one psi, one picture


@pytest.mark.parametrize(("height", "width"), [(4, 4), (8, 8), (33, 20), (224, 224)])
def test_the_autoencoder_paints_images_of_any_size(height: int, width: int) -> None:
    image_BCHW = draw(2, 1, height, width)

    assert Autoencoder(4, 1, height, width)(lambda _: draw(2, 4), image_BCHW, torch.zeros(2)).isfinite()


def test_alternate_is_the_base_loss_of_a_model_of_its_own() -> None:
    torch.manual_seed(0)
    head, z_BS, label_B = Softmax(3, 4), draw(6, 3), torch.tensor([0, 1, 2, 3, 0, 1])

    made = Alternate(Classifier(head), mixup=False)(nn.Identity(), z_BS, label_B)
    torch.testing.assert_close(made, F.cross_entropy(head(z_BS, label_B), label_B))


def test_mixup_weighs_both_labels_by_their_share_of_the_image() -> None:
    torch.manual_seed(0)
    head, image_BS, label_B = Softmax(3, 4), draw(6, 3), torch.tensor([0, 1, 2, 3, 0, 1])
    objective = Alternate(Classifier(head), mixup=True)

    torch.manual_seed(7)
    made = objective(nn.Identity(), image_BS, label_B)
    torch.manual_seed(7)
    share, other_B = torch.rand(()), torch.randperm(6)
    log_BC = head(share * image_BS + (1 - share) * image_BS[other_B], label_B).log_softmax(1)
    rows = torch.arange(6)
    expected = -(share * log_BC[rows, label_B] + (1 - share) * log_BC[rows, label_B[other_B]]).mean()
    torch.testing.assert_close(made, expected)


def test_side_information_is_unit_vectors_or_signs() -> None:
    raw = torch.tensor([[3.0, -4.0], [0.0, 2.0]])

    torch.testing.assert_close(finished(raw, bits=False), torch.tensor([[0.6, -0.8], [0.0, 1.0]]))
    assert finished(raw, bits=True).tolist() == [[1, -1], [-1, 1]]
    torch.testing.assert_close(Psi(nn.Identity(), bits=True)(raw), finished(raw, bits=True))


def test_only_signs_near_a_change_are_unsettled() -> None:
    raw = torch.tensor([[3.0, -4.0], [1e-6, 2.0]])

    assert is_stable(raw, bits=True).tolist() == [True, False]
    assert is_stable(raw, bits=False).tolist() == [True, True]


def test_each_image_of_a_batch_comes_again_as_another_view() -> None:
    recipe = recipe_of_psi(sided(batch_size=10))
    images = load_data("digits_old", "").train.dense()
    image_VCHW, label_V, _ = next(iter(training_batches(images, recipe, {}, views=2)))
    plain_VCHW, again_V, _ = next(iter(training_batches(images, replace(recipe, augment="none"), {}, views=2)))

    assert len(image_VCHW) == len(label_V) == 20
    assert torch.equal(label_V[:10], label_V[10:])
    assert torch.equal(plain_VCHW[:10], plain_VCHW[10:])
    assert torch.equal(label_V, again_V)
    assert not torch.isclose(image_VCHW[:10], image_VCHW[10:]).flatten(1).all(1).any()


def test_psi_is_trained_as_the_encoder_but_for_what_the_recipe_says() -> None:
    recipe = sided(epochs=7, side_epochs=3, seed=5)
    own = recipe_of_psi(recipe)

    assert (own.augment, own.epochs) == ("shift", 3)
    assert own.seed != recipe.seed
    assert recipe_of_psi(replace(recipe, side_epochs=0, side_augment="")).epochs == 7
    assert (dim_of(recipe), dim_of(replace(recipe, side_dim=9)), dim_of(replace(recipe, side=NONE))) == (16, 9, 0)
    assert build_psi(find_recipe("digits_v1")) is None


@pytest.mark.parametrize(
    ("side_epochs", "warmup", "milestones"),
    [(0, 5, (30, 60, 80)), (200, 10, (60, 120, 160)), (10, 0, (3, 6, 8)), (2, 0, (1,)), (1, 0, ())],
)
def test_psis_rate_rises_and_falls_at_the_same_shares_of_its_own_training(
    side_epochs: int, warmup: int, milestones: tuple[int, ...]
) -> None:
    own = recipe_of_psi(sided(epochs=100, warmup_epochs=5, milestones=(30, 60, 80), side_epochs=side_epochs))

    assert (own.warmup_epochs, own.milestones) == (warmup, milestones)
    BaseTraining(own)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"side": "magic"}, "side must be one of none, simclr, autoencoder, alternate, alternate_mixup, not 'magic'"),
        ({"side_crops": -1}, "side_crops must be 0, or more with side=simclr"),
        ({"side_crops": 2, "side": "autoencoder"}, "side_crops must be 0, or more with side=simclr"),
        ({"side_temperature": 0.0}, "side_temperature must be above 0"),
        ({"side_augment": ""}, "side=simclr requires two views of an image: set side_augment"),
    ],
)
def test_side_information_that_cannot_be_made_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        check_side(sided(**changes))
