"""Every loss against its formula as naive float64 loops, and hand-computable points."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from index.errors import InvalidArgument
from naive import cross_entropy
from tensors import draw64
from training.losses import losses

UNKNOWN = losses.UNKNOWN


def test_fit_dim_takes_the_first_components_or_fills_with_zeros() -> None:
    z = torch.tensor([[1.0, 2.0, 3.0]])

    assert losses.fit_dim(z, 2).tolist() == [[1.0, 2.0]]
    assert losses.fit_dim(z, 3).tolist() == [[1.0, 2.0, 3.0]]
    assert losses.fit_dim(z, 5).tolist() == [[1.0, 2.0, 3.0, 0.0, 0.0]]


@pytest.mark.parametrize("new_dim", [3, 5, 8])
def test_an_old_head_padded_with_zeros_equals_the_old_head_on_fitted_embeddings(new_dim: int) -> None:
    new, head, bias = draw64(4, new_dim), draw64(6, 5, seed=1), draw64(6, seed=2)
    width = max(new_dim, 5)
    padded = torch.nn.functional.pad(new, (0, width - new_dim)) @ torch.nn.functional.pad(head, (0, width - 5)).T + bias

    torch.testing.assert_close(losses.linear_logits(losses.fit_dim(new, 5), head, bias), padded)


def test_raw_logits_are_the_head_as_it_is_and_cosine_logits_are_scaled_cosines() -> None:
    z, head, bias = torch.tensor([[3.0, 4.0]]), torch.tensor([[2.0, 0.0], [0.0, 5.0]]), torch.tensor([1.0, -1.0])

    assert losses.linear_logits(z, head, bias).tolist() == [[7.0, 19.0]]
    torch.testing.assert_close(losses.linear_logits(z, head, bias, scale=16.0), torch.tensor([[9.6, 12.8]]))


@pytest.mark.parametrize("scale", [64.0, None])
def test_logits_of_a_frozen_head_keep_full_precision_under_autocast(scale: float | None) -> None:
    z, head = draw64(3, 8).float(), 64 * draw64(5, 8, seed=1).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = losses.linear_logits(z.bfloat16(), head, scale=scale)

    assert logits.dtype is torch.float32
    torch.testing.assert_close(logits, losses.linear_logits(z.bfloat16().float(), head, scale=scale))


def test_class_means_average_each_class_and_refuse_an_empty_one() -> None:
    z, label = torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 4.0]]), torch.tensor([1, 1, 0])

    assert losses.class_means(z, label, 2).tolist() == [[0.0, 4.0], [2.0, 0.0]]
    with pytest.raises(InvalidArgument, match="class 2 of 3 has no"):
        losses.class_means(z, label, 3)


@pytest.mark.parametrize(
    ("away", "radius"),
    [
        ([], math.inf),
        ([2.0], math.inf),  # its own centre
        ([1.0, 5.0, 1.0], 5.0),  # too few to say what is usual
        ([1.0, 2.0, 3.0, 4.0, 5.0, 9.0], 9.0),  # quartiles 2 and 5: nothing beyond 9.5
        ([1.0, 2.0, 3.0, 4.0, 5.0, 9.6], 5.0),
        ([3.0] * 7 + [3.5], 3.0),
    ],
)
def test_a_class_radius_is_the_distance_of_the_farthest_sample_that_is_no_outlier(
    away: list[float], radius: float
) -> None:
    z = torch.tensor([[3.0, 4.0], [0.0, 1.0], *([x, 0.0] for x in reversed(away))])

    radii = losses.class_radii(z, torch.tensor([0, 0] + [1] * len(away)), torch.zeros(2, 2))
    assert radii.tolist() == [5.0, radius]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_known_cross_entropy_averages_over_known_samples_only(smoothing: float) -> None:
    logits, label = draw64(5, 3), torch.tensor([0, UNKNOWN, 2, UNKNOWN, 1])
    naive = 0.0
    for i in (0, 2, 4):
        of_class = [cross_entropy(logits[i].tolist(), c) for c in range(3)]
        naive += (1 - smoothing) * of_class[int(label[i])] + smoothing * sum(of_class) / 3

    assert float(losses.known_cross_entropy(logits, label, smoothing)) == pytest.approx(naive / 3)


def test_known_cross_entropy_of_a_batch_without_known_samples_is_zero_with_zero_gradient() -> None:
    logits = draw64(2, 3).requires_grad_()
    loss = losses.known_cross_entropy(logits, torch.tensor([UNKNOWN, UNKNOWN]))
    loss.backward()

    assert loss.item() == 0
    assert float(logits.grad.abs().max()) == 0


def test_synthesised_heads_append_means_with_bias_zero_and_never_learn() -> None:
    head = draw64(2, 3).requires_grad_()
    means = draw64(1, 3, seed=1)
    weight, bias = losses.synthesise_head(head, torch.tensor([0.5, 0.25], dtype=torch.float64), means)

    assert weight.shape == (3, 3)
    assert torch.equal(weight[2], means[0])
    assert not weight.requires_grad
    assert bias.tolist() == [0.5, 0.25, 0.0]
    assert losses.synthesise_head(head, None, means)[1] is None


def naive_kl(new: Tensor, old: Tensor, temperature: float) -> float:
    p_new, p_old = ([math.exp(float(x) / temperature) for x in row] for row in (new, old))
    p_new, p_old = [x / sum(p_new) for x in p_new], [x / sum(p_old) for x in p_old]
    return temperature**2 * sum(o * math.log(o / n) for o, n in zip(p_old, p_new, strict=True))


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_distillation_equals_its_formula(temperature: float) -> None:
    new, old = draw64(4, 3), draw64(4, 3, seed=1)
    naive = [naive_kl(new[i], old[i], temperature) for i in range(4)]
    keep = torch.tensor([True, False, False, True])

    everyone = losses.distillation(new, old, temperature=temperature)
    kept = losses.distillation(new, old, keep, temperature=temperature)
    assert float(everyone) == pytest.approx(sum(naive) / 4)
    assert float(kept) == pytest.approx((naive[0] + naive[3]) / 2)


def test_distillation_of_equal_logits_is_zero_and_of_no_samples_too() -> None:
    logits = draw64(3, 4)

    assert float(losses.distillation(logits, logits)) == pytest.approx(0.0, abs=1e-12)
    assert float(losses.distillation(logits, -logits, torch.zeros(3, dtype=torch.bool))) == 0


def test_cosine_alignment_is_0_along_1_across_and_2_against() -> None:
    old = torch.tensor([[2.0, 0.0]])

    for new, expected in (([5.0, 0.0], 0.0), ([0.0, 1.0], 1.0), ([-1.0, 0.0], 2.0)):
        assert float(losses.cosine_alignment(torch.tensor([new]), old)) == pytest.approx(expected)


def test_half_square_counts_old_classes_only() -> None:
    new, old = torch.tensor([[1.0, 1.0], [9.0, 9.0]]), torch.tensor([[0.0, 3.0], [0.0, 0.0]])

    assert float(losses.half_squared_distance(new, old, torch.tensor([True, False]))) == 2.5
    assert float(losses.half_squared_distance(new, old)) == pytest.approx((2.5 + 81) / 2)
    assert float(losses.half_squared_distance(new, old, torch.tensor([False, False]))) == 0


def test_mean_square_and_gaussian_nll_equal_their_formulas() -> None:
    made, new, log_variance = draw64(3, 4), draw64(3, 4, seed=1), draw64(3, seed=2)
    square = [sum((float(made[i, j]) - float(new[i, j])) ** 2 for j in range(4)) / 4 for i in range(3)]
    nll = [0.5 * (square[i] / math.exp(float(log_variance[i])) + float(log_variance[i])) for i in range(3)]

    assert float(losses.mean_square(made, new)) == pytest.approx(sum(square) / 3)
    assert float(losses.gaussian_nll(made, log_variance, new)) == pytest.approx(sum(nll) / 3)


def test_gaussian_nll_is_smallest_where_the_variance_is_the_mean_square() -> None:
    made, new = draw64(1, 6), draw64(1, 6, seed=1)
    best = losses.mean_square(made, new).log()
    at = [float(losses.gaussian_nll(made, (best + shift)[None], new)) for shift in (-0.1, 0.0, 0.1)]

    assert at[1] < at[0]
    assert at[1] < at[2]


def test_reverse_gradient_passes_values_and_turns_gradients() -> None:
    x = torch.tensor([1.0, -2.0], requires_grad=True)
    turned = losses.reverse_gradient(x, 0.5)
    (turned * torch.tensor([3.0, 4.0])).sum().backward()

    assert torch.equal(turned, x)
    assert x.grad.tolist() == [-1.5, -2.0]


def test_discrimination_is_two_log_two_when_blind_and_small_when_right() -> None:
    blind = losses.discriminator_loss(torch.zeros(3), torch.zeros(3))
    right = losses.discriminator_loss(torch.full((3,), -9.0), torch.full((3,), 9.0))

    assert float(blind) == pytest.approx(2 * math.log(2))
    assert float(right) < 0.001


def test_outside_boundary_averages_the_overshoot_of_those_outside() -> None:
    new = torch.tensor([[2.0, 0.0], [0.0, 3.0], [-1.0, 0.0]])  # unit: 0, sqrt(2) and 2 away from (1, 0)
    centre = torch.tensor([[1.0, 0.0]]).expand(3, 2)

    inside_one = losses.boundary_loss(new, centre, torch.tensor([0.5, 0.4, 1.0]))
    assert float(inside_one) == pytest.approx((math.sqrt(2) - 0.4 + 1.0) / 2)
    assert float(losses.boundary_loss(new, centre, torch.full((3,), math.inf))) == 0
