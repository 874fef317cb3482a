"""The gradients that losses against an old version give, and those that they must not."""

from __future__ import annotations

import pytest
import torch

from tensors import draw64
from training import contrasts, losses

LABELS = torch.tensor([0, 1, 0, 2])
AGAINST_OLD = {
    "cosine_alignment": losses.cosine_alignment,
    "half_square": losses.half_square,
    "mean_square": losses.mean_square,
    "distillation": losses.distillation,
    "gaussian_nll": lambda new, old: losses.gaussian_nll(new, new[:, 0], old),
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
