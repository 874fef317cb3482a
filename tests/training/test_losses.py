"""Every loss against its formula as naive float64 loops, hand-computable points, and the gradients it must not give."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import Tensor

from index.errors import InvalidArgument
from naive import cross_entropy
from tensors import circle, draw64
from training import contrasts, losses

UNKNOWN = losses.UNKNOWN


def loop_dot(a: Tensor, b: Tensor) -> float:
    return sum(float(x) * float(y) for x, y in zip(a, b, strict=True))


def loop_cosine(a: Tensor, b: Tensor) -> float:
    return loop_dot(a, b) / math.sqrt(loop_dot(a, a) * loop_dot(b, b))


def loop_time(x: Tensor, k: float) -> float:
    return math.sqrt(1 / k + loop_dot(x, x))


def loop_distance(x: Tensor, y: Tensor, k: float) -> float:
    return math.acosh(max(1.0, -k * (loop_dot(x, y) - loop_time(x, k) * loop_time(y, k)))) / math.sqrt(k)


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


def test_cosine_logits_keep_full_precision_under_autocast() -> None:
    z, head = draw64(3, 8).float(), draw64(5, 8, seed=1).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = losses.linear_logits(z.bfloat16(), head, scale=64.0)

    assert logits.dtype is torch.float32
    torch.testing.assert_close(logits, losses.linear_logits(z.bfloat16().float(), head, scale=64.0))


def test_class_means_average_each_class_and_refuse_an_empty_one() -> None:
    z, label = torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 4.0]]), torch.tensor([1, 1, 0])

    assert losses.class_means(z, label, 2).tolist() == [[0.0, 4.0], [2.0, 0.0]]
    with pytest.raises(InvalidArgument, match="class 2 of 3 has no sample"):
        losses.class_means(z, label, 3)


@pytest.mark.parametrize(
    ("away", "radius"),
    [
        ([], 0.0),
        ([2.0], 2.0),
        ([1.0, 5.0, 1.0], 5.0),  # too few to say what is usual
        ([1.0, 2.0, 3.0, 4.0, 5.0, 9.0], 9.0),  # quartiles 2 and 5: nothing beyond 9.5
        ([1.0, 2.0, 3.0, 4.0, 5.0, 9.6], 5.0),
        ([3.0] * 7 + [3.5], 3.0),
    ],
)
def test_a_class_radius_is_the_distance_of_the_farthest_sample_that_is_no_outlier(
    away: list[float], radius: float
) -> None:
    z = torch.tensor([[3.0, 4.0], *([x, 0.0] for x in reversed(away))])

    radii = losses.class_radii(z, torch.tensor([0] + [1] * len(away)), torch.zeros(2, 2))
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

    assert float(losses.half_square(new, old, torch.tensor([True, False]))) == 2.5
    assert float(losses.half_square(new, old)) == pytest.approx((2.5 + 81) / 2)
    assert float(losses.half_square(new, old, torch.tensor([False, False]))) == 0


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


@pytest.mark.parametrize("temperature", [0.05, 0.5, 1.0])
@pytest.mark.parametrize("labels", [[0, 0, 1, 2], [0, 1, 2, 3], [1, 1, 1, 0]])
@pytest.mark.parametrize(("among_new", "hardest"), [(True, 0), (False, 0), (True, 1), (False, 2), (True, 9)])
def test_regression_alleviating_equals_its_formula(
    temperature: float, labels: list[int], among_new: bool, hardest: int
) -> None:
    new, old = draw64(4, 3), draw64(4, 3, seed=1)
    naive = 0.0
    for i in range(4):
        own = math.exp(loop_cosine(new[i], old[i]) / temperature)
        others = [k for k in range(4) if labels[k] != labels[i]]
        for side in (old, new) if among_new else (old,):
            terms = sorted((math.exp(loop_cosine(new[i], side[k]) / temperature) for k in others), reverse=True)
            own = (own, *terms[: hardest or 4]) if isinstance(own, float) else (*own, *terms[: hardest or 4])
        naive += math.log(sum(own) / own[0]) / 4

    made = contrasts.regression_alleviating(new, old, torch.tensor(labels), temperature, among_new, hardest)
    assert float(made) == pytest.approx(naive)


@pytest.mark.parametrize("among_new", [True, False])
@pytest.mark.parametrize("hardest", [0, 1, 2])
def test_triplet_equals_its_formula(among_new: bool, hardest: int) -> None:
    new, old, labels = draw64(4, 3), draw64(4, 3, seed=1), [0, 0, 1, 2]
    naive = 0.0
    for side in (old, new) if among_new else (old,):
        terms = []
        for i in range(4):
            own = math.sqrt(2 - 2 * loop_cosine(new[i], old[i]))
            away = sorted(math.sqrt(2 - 2 * loop_cosine(new[i], side[k])) for k in range(4) if labels[k] != labels[i])
            terms += [max(0.0, own - d + 0.8) for d in away[: hardest or 4]]
        naive += sum(terms) / len(terms)

    assert float(contrasts.triplet(new, old, torch.tensor(labels), 0.8, among_new, hardest)) == pytest.approx(naive)


def test_a_triplet_is_satisfied_a_margin_away_and_costs_the_margin_on_the_spot() -> None:
    new, label = circle(0.0, 180.0), torch.tensor([0, 1])

    assert float(contrasts.triplet(new, new, label, 0.8)) == pytest.approx(0.0, abs=1e-5)
    turned = circle(60.0, 60.0)  # 1 away from the own old embedding; 2 sin 60 degrees from the other's
    expected = (max(0, 1 - math.sqrt(3) + 0.8) + math.sqrt(3) - 1 + 0.8) / 2
    assert float(contrasts.triplet(turned, new, label, 0.8, among_new=False)) == pytest.approx(expected)


def test_regression_alleviating_of_one_class_has_nothing_to_push_from() -> None:
    loss = contrasts.regression_alleviating(draw64(3, 2), draw64(3, 2, seed=1), torch.tensor([7, 7, 7]), 0.1)

    assert float(loss) == 0


def test_masked_alignment_leaves_same_class_pairs_out_instead_of_counting_them_as_zero() -> None:
    new, old, labels = draw64(4, 3), draw64(4, 3, seed=1), [0, 0, 1, 2]
    naive = 0.0
    for i in range(4):
        others = [k for k in range(4) if labels[k] != labels[i]]
        crowd = math.log(sum(math.exp(10 * loop_cosine(old[i], new[k])) for k in others))
        naive += (crowd - 10 * loop_cosine(old[i], new[i])) / 4

    assert float(contrasts.masked_alignment(new, old, torch.tensor(labels), 10.0)) == pytest.approx(naive)


def test_masked_alignment_of_one_class_is_zero_and_finite_in_gradient() -> None:
    new = draw64(3, 2).requires_grad_()
    loss = contrasts.masked_alignment(new, draw64(3, 2, seed=1), torch.tensor([1, 1, 1]), 10.0)
    loss.backward()

    assert loss.item() == 0
    assert bool(new.grad.isfinite().all())


def test_reverse_gradient_passes_values_and_turns_gradients() -> None:
    x = torch.tensor([1.0, -2.0], requires_grad=True)
    turned = losses.reverse_gradient(x, 0.5)
    (turned * torch.tensor([3.0, 4.0])).sum().backward()

    assert torch.equal(turned, x)
    assert x.grad.tolist() == [-1.5, -2.0]


def test_discrimination_is_two_log_two_when_blind_and_small_when_right() -> None:
    blind = losses.discrimination(torch.zeros(3), torch.zeros(3))
    right = losses.discrimination(torch.full((3,), -9.0), torch.full((3,), 9.0))

    assert float(blind) == pytest.approx(2 * math.log(2))
    assert float(right) < 0.001


def test_outside_boundary_averages_the_overshoot_of_those_outside() -> None:
    new = torch.tensor([[2.0, 0.0], [0.0, 3.0], [-1.0, 0.0]])  # unit: 0, sqrt(2) and 2 away from (1, 0)
    centre = torch.tensor([[1.0, 0.0]]).expand(3, 2)

    inside_one = losses.outside_boundary(new, centre, torch.tensor([0.5, 0.4, 1.0]))
    assert float(inside_one) == pytest.approx((math.sqrt(2) - 0.4 + 1.0) / 2)
    assert float(losses.outside_boundary(new, centre, torch.full((3,), math.inf))) == 0


def test_nt_xent_equals_its_formula() -> None:
    first, second = draw64(3, 4), draw64(3, 4, seed=1)
    views = [*first, *second]
    naive = 0.0
    for i in range(6):
        logits = [loop_cosine(views[i], views[j]) / 0.2 for j in range(6) if j != i]
        target = (i + 3) % 6
        naive += cross_entropy(logits, target - (target > i)) / 6

    assert float(contrasts.nt_xent(first, second, 0.2)) == pytest.approx(naive)


def test_nt_xent_agrees_with_pytorch_metric_learning() -> None:
    pml = pytest.importorskip("pytorch_metric_learning.losses")
    first, second = draw64(5, 8).float(), draw64(5, 8, seed=1).float()
    labels = torch.arange(5).repeat(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference = pml.NTXentLoss(temperature=0.3)(torch.cat([first, second]), labels)

    torch.testing.assert_close(contrasts.nt_xent(first, second, 0.3), reference)


def naive_outside(old: Tensor, new: Tensor, k: float, boundary: float) -> float:
    product = k * (loop_dot(old, new) - loop_time(old, k) * loop_time(new, k))
    length = math.sqrt(loop_dot(old, old))
    quotient = (loop_time(new, k) + product * loop_time(old, k)) / (length * math.sqrt(product**2 - 1))
    return max(0.0, math.acos(quotient) - math.asin(min(1.0, 2 * boundary / (math.sqrt(k) * length))))


@pytest.mark.parametrize("k", [1.0, 0.5, 2.0])
def test_entailment_equals_its_formula(k: float) -> None:
    new, old = draw64(5, 3), draw64(5, 3, seed=1)
    naive = sum(naive_outside(old[i], new[i], k, 0.1) for i in range(5)) / 5

    assert naive > 0
    assert float(contrasts.entailment(new, old, k)) == pytest.approx(naive)


def test_a_new_point_straight_behind_the_old_one_is_entailed_and_one_before_it_is_not() -> None:
    old = torch.tensor([[1.0, 0.0]])

    assert float(contrasts.entailment(torch.tensor([[3.0, 0.0]]), old)) == 0
    assert float(contrasts.entailment(torch.tensor([[0.3, 0.0]]), old)) == pytest.approx(
        math.pi - math.asin(0.2), abs=5e-3
    )


def test_uncertainty_is_1_at_the_origin_and_falls_with_the_distance_from_it() -> None:
    x = torch.tensor([[0.0, 0.0], [math.sinh(1.0), 0.0], [0.0, math.sinh(2.0)]], dtype=torch.float64)

    expected = [1.0, 1 - math.tanh(1.0), 1 - math.tanh(2.0)]
    assert contrasts.uncertainty(x).tolist() == pytest.approx(expected)
    half = contrasts.uncertainty(x[1:2] / 2, curvature=4.0)  # |z| = 1/2 there, times sqrt(K) = 1
    assert half.tolist() == pytest.approx([1 - math.tanh(1.0)])


@pytest.mark.parametrize("k", [1.0, 0.5])
@pytest.mark.parametrize("density", [0.01, 1.0])
@pytest.mark.parametrize("form", ["rince", "rince_of_cosines"])
def test_rince_equals_its_formula(k: float, density: float, form: str) -> None:
    new, old = draw64(4, 3), draw64(4, 3, seed=1)
    naive = 0.0
    for i in range(4):
        length = math.asinh(math.sqrt(k * loop_dot(old[i], old[i]))) / math.sqrt(k)
        q = 1 - math.tanh(math.sqrt(k) * length)
        away = [loop_distance(new[i], old[j], k) / 0.5 for j in range(4)]
        if form == "rince_of_cosines":
            away = [-loop_cosine(new[i], old[j]) / 0.5 for j in range(4)]
        crowd = density * sum(math.exp(-d) for d in away)
        naive += (-math.exp(-q * away[i]) / q + crowd**q / q) / 4

    assert float(getattr(contrasts, form)(new, old, k, density=density)) == pytest.approx(naive, rel=1e-6)


def test_robust_contrast_goes_from_info_nce_to_the_mean_similarity_gap_as_q_rises() -> None:
    similarity = draw64(4, 4)
    crowd = similarity.exp().sum(1)

    info_nce = (crowd.log() - similarity.diagonal()).mean() + math.log(0.5)
    torch.testing.assert_close(
        contrasts.robust_contrast(similarity, torch.full((4,), 1e-9), 0.5), info_nce, rtol=1e-3, atol=1e-3
    )
    linear = (0.5 * crowd - similarity.diagonal().exp()).mean()
    torch.testing.assert_close(contrasts.robust_contrast(similarity, torch.ones(4).double(), 0.5), linear)


def test_rince_of_a_certain_old_point_is_info_nce_plus_log_density() -> None:
    far = 200.0 * torch.nn.functional.normalize(draw64(3, 4))  # q about 1e-5: below its clamp at 1e-4
    new = far + draw64(3, 4, seed=1)

    expected = contrasts.info_nce(new, far) + math.log(0.01)
    torch.testing.assert_close(contrasts.rince(new, far), expected, rtol=1e-3, atol=1e-3)


def test_info_nce_equals_its_formula() -> None:
    new, old = draw64(4, 3), draw64(4, 3, seed=1)
    naive = 0.0
    for i in range(4):
        away = [loop_distance(new[i], old[j], 1.0) / 0.5 for j in range(4)]
        naive += (away[i] + math.log(sum(math.exp(-d) for d in away))) / 4

    assert float(contrasts.info_nce(new, old)) == pytest.approx(naive)


LABELS = torch.tensor([0, 1, 0, 2])
AGAINST_OLD = {
    "cosine_alignment": losses.cosine_alignment,
    "half_square": losses.half_square,
    "mean_square": losses.mean_square,
    "distillation": losses.distillation,
    "regression_alleviating": lambda new, old: contrasts.regression_alleviating(new, old, LABELS, 0.1),
    "masked_alignment": lambda new, old: contrasts.masked_alignment(new, old, LABELS, 10.0),
    "outside_boundary": lambda new, old: losses.outside_boundary(new, old, torch.full((4,), 0.1).double()),
    "triplet": lambda new, old: contrasts.triplet(new, old, LABELS, 0.8, hardest=2),
    "rince_of_cosines": contrasts.rince_of_cosines,
    "entailment": contrasts.entailment,
    "rince": contrasts.rince,
    "info_nce": contrasts.info_nce,
}


@pytest.mark.parametrize("name", AGAINST_OLD)
def test_gradients_reach_the_new_embedding_and_never_the_old_one(name: str) -> None:
    new, old = draw64(4, 3).requires_grad_(), draw64(4, 3, seed=1).requires_grad_()
    AGAINST_OLD[name](new, old).backward()

    assert old.grad is None
    assert float(new.grad.norm()) > 0


@pytest.mark.parametrize("name", AGAINST_OLD)
def test_gradients_equal_finite_differences(name: str) -> None:
    old = draw64(4, 3, seed=1)

    assert torch.autograd.gradcheck(lambda new: AGAINST_OLD[name](new, old), (draw64(4, 3).requires_grad_(),))


@pytest.mark.parametrize("name", ["entailment", "rince", "info_nce"])
@pytest.mark.parametrize("degenerate", ["equal", "zero", "huge"])
def test_hyperbolic_losses_stay_finite_at_degenerate_points(name: str, degenerate: str) -> None:
    old = draw64(4, 3, seed=1).float()
    starts = {"equal": old.clone(), "zero": torch.zeros(4, 3), "huge": 2.0**15 * torch.nn.functional.normalize(old)}
    new = starts[degenerate].requires_grad_()
    loss = AGAINST_OLD[name](new, old)
    loss.backward()

    assert bool(loss.isfinite())
    assert bool(new.grad.isfinite().all())
