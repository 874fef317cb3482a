"""The gradients that losses give, against an old version and as whole methods, and those that they must not."""

from __future__ import annotations

import pytest
import torch

from tensors import draw64
from training.losses import contrasts, losses
from training.method import Classifier, EmbeddedBatch, OldSummary
from training.networks.heads import HEADS
from training.recipes import Recipe
from training.trained import build_method

LABELS = torch.tensor([0, 1, 0, 2])
AGAINST_OLD = {
    "cosine_alignment": losses.cosine_alignment,
    "half_squared_distance": losses.half_squared_distance,
    "mean_square": losses.mean_square,
    "distillation": losses.distillation,
    "gaussian_nll": lambda new, old: losses.gaussian_nll(new, new[:, 0], old),
    "regression_alleviating": lambda new, old: contrasts.regression_alleviating(new, old, LABELS, 0.1),
    "masked_alignment": lambda new, old: contrasts.masked_alignment(new, old, LABELS, 10.0),
    "boundary_loss": lambda new, old: losses.boundary_loss(new, old, torch.full((4,), 0.1).double()),
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


OF_ONE = {
    "nt_xent": lambda x: contrasts.nt_xent(x[:2], x[2:], 0.5),
    "known_cross_entropy": lambda x: losses.known_cross_entropy(x, torch.tensor([0, 2, losses.UNKNOWN, 1]), 0.1),
    "discriminator_loss": lambda x: losses.discriminator_loss(x[:, 0], x[:, 1]),
}


@pytest.mark.parametrize("name", OF_ONE)
def test_gradients_of_what_looks_at_no_old_embedding_equal_finite_differences(name: str) -> None:
    assert torch.autograd.gradcheck(OF_ONE[name], (draw64(4, 3).requires_grad_(),))


WHOLE: dict[str, dict[str, object]] = {
    "independent": {},
    "l2": {},
    "l2, letter": {"over": "old", "unit": False},
    "lwf": {},
    "lwf, raw": {"logits": "raw"},
    "bct": {},
    "bct, head": {"logits": "head"},
    "bct, raw": {"logits": "raw"},
    "bct, distill": {"influence": "distill", "logits": "cosine"},
    "bct, alleviate": {"influence": "old", "logits": "raw", "alleviate": True},
    "contrast": {},
    "hot_refresh": {},
    "hot_refresh, triplet": {"form": "triplet", "hardest": 2},
    "hot_refresh, plain": {"among_new": False, "hardest": 1},
    # Reversed gradients are none of the loss's own: at the end of a training they have faded out.
    "advbct": {"threshold": 0.1},
    "hoc": {},
    "bt2": {"extra": 2},
    "bt2, cosine": {"extra": 2, "logits": "cosine"},
    "oca": {},
    "oca, raw": {"logits": "raw"},
    "oca, cosine": {"logits": "cosine"},
    "hbct": {},
    "hbct, cosine": {"contrast": "cosine"},
}
"""Method and options; FCT's loss is `mean_square` of what its transform makes."""


@pytest.mark.parametrize("name", HEADS)
def test_gradients_of_a_head_and_of_its_weights_equal_finite_differences(name: str) -> None:
    torch.manual_seed(0)
    base = Classifier(HEADS[name](3, 3), 0.1).double()

    def loss(z_BD: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return base(z_BD, LABELS)

    assert torch.autograd.gradcheck(loss, (draw64(4, 3).requires_grad_(), *base.parameters()))


@pytest.mark.parametrize("form", WHOLE)
def test_the_gradient_of_a_whole_method_equals_finite_differences(form: str) -> None:
    name = form.partition(",")[0]
    torch.manual_seed(0)
    space, head = ("lorentz", "lorentz_mlr") if name == "hbct" else ("cosine", "softmax")
    dim, independent = {"bt2": 6, "oca": 5}.get(name, 3), 3 * (name == "bt2")
    recipe = Recipe("tiny", method=name, dim=dim, space=space, head=head, label_smoothing=0.1, options=WHOLE[form])
    means = draw64(3, 3, seed=2)
    head_KN = draw64(2, 3, seed=3), draw64(2, seed=4)
    known = torch.tensor([0, 1, losses.UNKNOWN])
    old = OldSummary(means, known, *head_KN, space, torch.nn.functional.normalize(means), 0.1 * torch.ones(3).double())
    method = build_method(recipe, 3, None if name == "independent" else old, independent)
    assert isinstance(method, torch.nn.Module)
    method.double()

    def loss(new_BD: torch.Tensor) -> torch.Tensor:
        return method(EmbeddedBatch(new_BD, LABELS, draw64(4, 3, seed=1), draw64(4, 3, seed=5), 1.0)).loss

    assert torch.autograd.gradcheck(loss, (draw64(4, dim).requires_grad_(),))


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
