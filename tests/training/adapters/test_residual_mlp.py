"""The residual MLP: where it starts, what it learns, and that a seed decides it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from index.evaluation.adapters import procrustes
from index.space import Vectors
from naive import draw, mean_square, rotation, unit
from training.adapters.residual_mlp import ResidualMlp, residual_mlp


def test_the_residual_mlp_starts_from_procrustes_and_learns_what_no_matrix_can() -> None:
    new = draw(600, 4)
    old = unit(new @ rotation(4) + 0.8 * np.abs(new))
    linear = mean_square(lambda x: unit(procrustes(new, old)(x)), new, old)
    start = residual_mlp(new, old, epochs=0)
    fitted = residual_mlp(new, old, hidden=64, epochs=40)

    def run(mlp: ResidualMlp, x: Vectors) -> Vectors:
        return mlp(torch.from_numpy(x)).numpy()

    assert mean_square(lambda x: run(start, x), new, old) == pytest.approx(linear, rel=1e-4)
    assert mean_square(lambda x: run(fitted, x), new, old) < 0.3 * linear
    np.testing.assert_allclose(np.linalg.norm(run(fitted, new), axis=1), 1.0, atol=1e-5)


def test_the_residual_mlp_is_the_same_for_the_same_seed_and_leaves_the_global_seed_alone() -> None:
    new, old = draw(40, 3), draw(40, 5, seed=1)
    torch.manual_seed(7)
    first = residual_mlp(new, old, epochs=2)
    drawn = torch.rand(1)
    torch.manual_seed(7)

    assert torch.equal(torch.rand(1), drawn)
    assert torch.equal(first.outer.weight, residual_mlp(new, old, epochs=2).outer.weight)
    assert not torch.equal(first.outer.weight, residual_mlp(new, old, epochs=2, seed=1).outer.weight)
