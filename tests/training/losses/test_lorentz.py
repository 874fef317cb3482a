"""The Lorentz geometry: points computed by hand, identities, index.space's numpy twin, and precision."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from index.space import Lorentz
from tensors import draw64
from training.losses import lorentz

CURVATURES = [0.3, 1.0, 4.0]


def test_the_exponential_map_sends_a_tangent_vector_to_its_sinh_along_the_same_direction() -> None:
    x = lorentz.expmap0(torch.tensor([[0.6, 0.8], [0.0, 0.0], [-2.0, 0.0]], dtype=torch.float64))

    expected = [[0.6 * math.sinh(1), 0.8 * math.sinh(1)], [0.0, 0.0], [-math.sinh(2), 0.0]]
    torch.testing.assert_close(x, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("k", CURVATURES)
def test_the_logarithm_undoes_the_exponential_map(k: float) -> None:
    v = torch.cat([draw64(20, 5), torch.zeros(1, 5).double()])

    torch.testing.assert_close(lorentz.logmap0(lorentz.expmap0(v, k), k), v)


@pytest.mark.parametrize("k", CURVATURES)
def test_the_distance_from_the_origin_is_the_length_of_the_tangent_vector(k: float) -> None:
    v = draw64(20, 5)
    origin = torch.zeros_like(v)

    torch.testing.assert_close(lorentz.distance(lorentz.expmap0(v, k), origin, k), v.norm(dim=1))


@pytest.mark.parametrize("k", CURVATURES)
def test_a_point_has_lorentz_norm_minus_one_over_k(k: float) -> None:
    x = draw64(20, 5)

    torch.testing.assert_close(lorentz.inner(x, x, k), torch.full((20,), -1 / k, dtype=torch.float64))


def test_distances_along_one_line_through_the_origin_add_up() -> None:
    at = {length: lorentz.expmap0(torch.tensor([[length, 0.0]], dtype=torch.float64)) for length in (-1.0, 0.5, 2.0)}

    assert float(lorentz.distance(at[-1.0], at[2.0])) == pytest.approx(3.0)
    assert float(lorentz.distance(at[0.5], at[2.0])) == pytest.approx(1.5)


def test_distances_at_a_right_angle_obey_the_hyperbolic_pythagoras() -> None:
    a = lorentz.expmap0(torch.tensor([[1.0, 0.0]], dtype=torch.float64))
    b = lorentz.expmap0(torch.tensor([[0.0, 2.0]], dtype=torch.float64))

    assert float(lorentz.distance(a, b)) == pytest.approx(math.acosh(math.cosh(1) * math.cosh(2)))


@pytest.mark.parametrize("k", CURVATURES)
def test_pairwise_functions_agree_with_matching_rows_and_are_symmetric(k: float) -> None:
    x, y = draw64(4, 3), draw64(6, 3, seed=1)
    pairwise = lorentz.pairwise_distance(x, y, k)

    assert pairwise.shape == (4, 6)
    torch.testing.assert_close(pairwise, lorentz.pairwise_distance(y, x, k).T)
    for row in range(4):
        rows = x[row].expand(6, 3)
        torch.testing.assert_close(pairwise[row], lorentz.distance(rows, y, k))
        torch.testing.assert_close(lorentz.pairwise_inner(x, y, k)[row], lorentz.inner(rows, y, k))


@pytest.mark.parametrize("k", CURVATURES)
def test_training_and_serving_agree_on_distances(k: float) -> None:
    space = Lorentz(k)
    x = lorentz.expmap0(draw64(30, 8).float(), k)
    y = lorentz.expmap0(draw64(50, 8, seed=1).float(), k)
    scanned = space.queries(x.numpy()) @ space.items(y.numpy()).T

    np.testing.assert_allclose(space.score(scanned), lorentz.pairwise_distance(x, y, k).numpy(), rtol=1e-4, atol=2e-3)
    np.testing.assert_allclose(space.items(y.numpy())[:, -1], lorentz.time_part(y, k).numpy(), rtol=1e-6)


def test_the_cone_narrows_away_from_the_origin_and_is_a_half_space_too_near_it() -> None:
    x = torch.tensor([[0.4, 0.0], [2.0, 0.0], [0.01, 0.0], [0.0, 0.0]], dtype=torch.float64)
    aperture = lorentz.half_aperture(x)

    assert aperture[:2].tolist() == pytest.approx([math.asin(0.5), math.asin(0.1)])
    assert aperture[2:].tolist() == pytest.approx([math.pi / 2] * 2, abs=2e-3)
    assert float(lorentz.half_aperture(x[1:2], curvature=4.0)) == pytest.approx(math.asin(0.05))


@pytest.mark.parametrize("k", CURVATURES)
def test_the_exterior_angle_is_0_behind_pi_before_and_the_triangle_angle_beside(k: float) -> None:
    x = lorentz.expmap0(torch.tensor([[1.0, 0.0]], dtype=torch.float64), k)
    behind, before, beside = (
        lorentz.expmap0(torch.tensor([v], dtype=torch.float64), k) for v in ([2.0, 0.0], [0.5, 0.0], [0.0, 1.5])
    )
    # Interior angle at x of the right triangle origin, x, beside: tan = tanh(opposite) / sinh(adjacent).
    interior = math.atan(math.tanh(1.5 * math.sqrt(k)) / math.sinh(math.sqrt(k)))

    assert float(lorentz.exterior_angle(x, behind, k)) == pytest.approx(0.0, abs=2e-3)
    assert float(lorentz.exterior_angle(x, before, k)) == pytest.approx(math.pi, abs=2e-3)
    assert float(lorentz.exterior_angle(x, beside, k)) == pytest.approx(math.pi - interior)


def test_clip_norm_shortens_long_rows_only() -> None:
    v = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])

    torch.testing.assert_close(lorentz.clip_norm(v, 1.0), torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]]))


def test_lift_divides_by_the_root_of_the_dimension_clips_and_maps() -> None:
    z = torch.tensor([[0.8, 0.0, 0.0, 0.0], [0.0, 30.0, 0.0, 0.0]], dtype=torch.float64)
    tangent = lorentz.logmap0(lorentz.lift(z, radius=1.2))

    torch.testing.assert_close(tangent.norm(dim=1), torch.tensor([0.4, 1.2], dtype=torch.float64))


def naive_hyperplane_logit(x: Tensor, z: Tensor, a: float, k: float) -> float:
    """Signed distance of x to the hyperplane through exp0(a z/|z|) with normal z transported there, times |z|."""
    root, length = math.sqrt(k), float(z.norm())
    # The hyperplane's normal in the ambient space: (space part, time part), unit length in the Lorentz product.
    normal_space, normal_time = math.cosh(root * a) * z / length, math.sinh(root * a)
    product = float(normal_space @ x) - normal_time * math.sqrt(1 / k + float(x @ x))
    return length * math.asinh(root * product) / root


@pytest.mark.parametrize("k", CURVATURES)
def test_hyperplane_logits_are_signed_distances_times_the_length_of_the_normal(k: float) -> None:
    x, z, a = draw64(4, 3), draw64(5, 3, seed=1), 0.5 * draw64(5, seed=2)
    naive = [[naive_hyperplane_logit(x[i], z[c], float(a[c]), k) for c in range(5)] for i in range(4)]

    torch.testing.assert_close(lorentz.hyperplane_logits(x, z, a, k), torch.tensor(naive, dtype=torch.float64))


@pytest.mark.parametrize("k", CURVATURES)
def test_a_point_at_the_offset_along_the_normal_lies_on_the_hyperplane(k: float) -> None:
    direction = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    on = lorentz.expmap0(0.7 * direction, k)
    beyond = lorentz.expmap0(1.7 * direction, k)
    offset = torch.tensor([0.7], dtype=torch.float64)

    assert float(lorentz.hyperplane_logits(on, direction, offset, k)) == pytest.approx(0.0, abs=1e-12)
    assert float(lorentz.hyperplane_logits(beyond, direction, offset, k)) == pytest.approx(1.0)


FUNCTIONS = {
    "expmap0": lambda x, _: lorentz.expmap0(x),
    "logmap0": lambda x, _: lorentz.logmap0(x),
    "lift": lambda x, _: lorentz.lift(x, 1.0),
    "distance": lorentz.distance,
    "pairwise_distance": lorentz.pairwise_distance,
    "half_aperture": lambda x, _: lorentz.half_aperture(x),
    "exterior_angle": lorentz.exterior_angle,
    "hyperplane_logits": lambda x, y: lorentz.hyperplane_logits(x, y, y[:, 0]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_geometry_runs_in_float32_under_autocast(name: str) -> None:
    x, y = draw64(4, 3).float(), draw64(4, 3, seed=1).float()
    expected = FUNCTIONS[name](x, y)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = FUNCTIONS[name](x, y)
        from_half = FUNCTIONS[name](x.bfloat16(), y.bfloat16())

    assert torch.equal(inside, expected)
    assert from_half.dtype is torch.float32


@pytest.mark.parametrize("name", FUNCTIONS)
def test_geometry_has_finite_gradients_at_the_origin_at_equal_points_and_far_away(name: str) -> None:
    for start in (torch.zeros(2, 3), torch.ones(2, 3), torch.full((2, 3), 300.0)):
        x, y = start.clone().requires_grad_(), start.clone().requires_grad_()
        value = FUNCTIONS[name](x, y)
        value.sum().backward()

        assert bool(value.isfinite().all())
        for leaf in (x, y):
            assert leaf.grad is None or bool(leaf.grad.isfinite().all())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_geometry_gradients_equal_finite_differences(name: str) -> None:
    x, y = draw64(3, 4).requires_grad_(), draw64(3, 4, seed=1).requires_grad_()

    assert torch.autograd.gradcheck(FUNCTIONS[name], (x, y))
