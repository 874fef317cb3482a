"""Every contrast of a batch against its formula as naive float64 loops, and hand-computable points."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import Tensor

from naive import cross_entropy
from tensors import circle, draw64
from training.losses import contrasts


def loop_dot(a: Tensor, b: Tensor) -> float:
    return sum(float(x) * float(y) for x, y in zip(a, b, strict=True))


def loop_cosine(a: Tensor, b: Tensor) -> float:
    return loop_dot(a, b) / math.sqrt(loop_dot(a, a) * loop_dot(b, b))


def loop_time(x: Tensor, k: float) -> float:
    return math.sqrt(1 / k + loop_dot(x, x))


def loop_distance(x: Tensor, y: Tensor, k: float) -> float:
    return math.acosh(max(1.0, -k * (loop_dot(x, y) - loop_time(x, k) * loop_time(y, k)))) / math.sqrt(k)


@pytest.mark.parametrize("temperature", [0.05, 0.5, 1.0])
@pytest.mark.parametrize("labels", [[0, 0, 1, 2], [0, 1, 2, 3], [1, 1, 1, 0]])
@pytest.mark.parametrize(("among_new", "hardest"), [(True, 0), (False, 0), (True, 1), (False, 2), (True, 9)])
def test_regression_alleviating_equals_its_formula(
    temperature: float, labels: list[int], among_new: bool, hardest: int
) -> None:
    new, old = draw64(4, 3), draw64(4, 3, seed=1)
    naive = 0.0
    for i in range(4):
        terms = [math.exp(loop_cosine(new[i], old[i]) / temperature)]
        others = [k for k in range(4) if labels[k] != labels[i]]
        for side in (old, new) if among_new else (old,):
            rivals = sorted((math.exp(loop_cosine(new[i], side[k]) / temperature) for k in others), reverse=True)
            terms += rivals[: hardest or 4]
        naive += math.log(sum(terms) / terms[0]) / 4

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
