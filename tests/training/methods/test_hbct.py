"""HBCT: its terms, its ablations, the clip that grows, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch

from index.errors import InvalidArgument
from index.version import EdgeKind
from tensors import draw
from training.losses import contrasts, lorentz
from training.method import Classifier, EmbeddedBatch, MethodContext, OldSummary
from training.methods.hbct import Hbct
from training.networks.heads import LorentzMLR

DIM, CLASSES = 4, 3


def method_context(
    old_dim: int | None = DIM, space: str = "lorentz", old_space: str = "lorentz", reach: float = 0.0
) -> MethodContext:
    rows = torch.zeros(CLASSES, dtype=torch.long)
    old = None if old_dim is None else OldSummary(draw(CLASSES, old_dim), rows, space=old_space, reach=reach)
    return MethodContext(DIM, CLASSES, lambda d: Classifier(LorentzMLR(d, CLASSES)), old, space)


def build(**options: object) -> Hbct:
    torch.manual_seed(0)
    return Hbct(method_context(), **options)


def batch() -> EmbeddedBatch:
    old_BN = lorentz.lift(draw(6, DIM, seed=1), 1.0).requires_grad_()
    return EmbeddedBatch(3 * draw(6, DIM).requires_grad_(), torch.arange(6) % CLASSES, old_BN)


def test_the_loss_is_the_base_loss_plus_the_weighted_entailment_and_rince() -> None:
    method, given = build(), batch()
    assert given.old_BN is not None
    new = lorentz.lift(given.new_BD, 1.2)
    expected = method.classifier(new, given.label_B) + 0.3 * (
        contrasts.entailment(new, given.old_BN) + contrasts.rince(new, given.old_BN)
    )

    torch.testing.assert_close(method(given).loss, expected)


@pytest.mark.parametrize(
    ("options", "terms"),
    [
        ({}, {"base", "entailment", "contrast"}),
        ({"entail": False}, {"base", "contrast"}),
        ({"contrast": "none"}, {"base", "entailment"}),
        ({"entail": False, "contrast": "none"}, {"base"}),
    ],
)
def test_ablations_leave_terms_out(options: dict[str, object], terms: set[str]) -> None:
    assert set(build(**options)(batch()).logging) == terms


def test_the_info_nce_ablation_replaces_rince() -> None:
    method, given = build(contrast="info_nce"), batch()
    assert given.old_BN is not None

    expected = contrasts.info_nce(lorentz.lift(given.new_BD, 1.2), given.old_BN)
    torch.testing.assert_close(method(given).logging["contrast"], expected)


def test_without_an_old_version_the_base_loss_alone_trains_and_there_is_no_edge() -> None:
    torch.manual_seed(0)
    first = Hbct(method_context(old_dim=None), zeta=1.0)
    step = first(EmbeddedBatch(batch().new_BD, batch().label_B))

    assert set(step.logging) == {"base"}
    torch.testing.assert_close(step.loss, step.logging["base"])
    assert first.edge_kind is None
    assert build().edge_kind is EdgeKind.IDENTITY


@pytest.mark.parametrize("zeta", [1.0, 1.2, 1.4])
def test_stored_points_lie_within_zeta_of_the_origin(zeta: float) -> None:
    stored = build(zeta=zeta).transform(100 * draw(20, DIM))
    away = lorentz.distance(stored, torch.zeros_like(stored))

    torch.testing.assert_close(away, torch.full((20,), zeta), rtol=1e-5, atol=1e-5)


def test_gradients_reach_the_backbone_and_the_head_and_never_the_old_side() -> None:
    method, given = build(), batch()
    given.new_BD.retain_grad()
    method(given).loss.backward()

    assert given.old_BN.grad is None
    assert bool(given.new_BD.grad.any())
    for name, parameter in method.named_parameters():
        assert parameter.grad is not None, name


def test_training_moves_new_points_into_the_cones_of_old_ones() -> None:
    torch.manual_seed(0)
    method, old_BN = build(contrast="none"), lorentz.lift(4 * draw(6, DIM, seed=1), 1.0)
    z_BD = draw(6, DIM).requires_grad_()
    optimiser = torch.optim.Adam([z_BD], lr=0.05)
    first, outside = math.nan, math.nan
    for _ in range(150):
        optimiser.zero_grad()
        loss = contrasts.entailment(method.transform(z_BD), old_BN)
        loss.backward()
        optimiser.step()
        outside = loss.item()
        first = outside if math.isnan(first) else first

    assert first > 0.5
    assert outside < 0.05


def test_mixed_precision_gives_the_same_loss_up_to_the_backbone_output() -> None:
    method, given = build(), batch()
    expected = method(given).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = method(given).loss

    torch.testing.assert_close(inside, expected)


def test_the_head_can_start_with_the_length_that_its_number_of_classes_wants() -> None:
    drawn, long = (build(head_start=start).classifier.weights()[0] for start in ("drawn", "adacos"))

    torch.testing.assert_close(long.norm(dim=1), torch.full((CLASSES,), 2**0.5 * math.log(CLASSES - 1)))
    torch.testing.assert_close(long / long.norm(dim=1, keepdim=True), drawn / drawn.norm(dim=1, keepdim=True))


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="hbct needs space=lorentz, not cosine"):
        Hbct(method_context(space="cosine"))
    with pytest.raises(InvalidArgument, match="needs a hyperbolic old version"):
        Hbct(method_context(old_space="cosine"))
    with pytest.raises(InvalidArgument, match="old version's dimension 7, not 4"):
        Hbct(method_context(old_dim=7))
    with pytest.raises(InvalidArgument, match=r"zeta must be above 1\.20"):
        Hbct(method_context(reach=1.2), zeta=1.2)
    Hbct(method_context(reach=1.2), zeta=1.4)
    with pytest.raises(InvalidArgument, match="contrast must be one of rince, cosine, info_nce, none"):
        build(contrast="nce")
    with pytest.raises(InvalidArgument, match="head_start must be one of drawn, adacos"):
        build(head_start="large")
