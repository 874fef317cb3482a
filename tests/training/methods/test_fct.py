"""FCT: the transform h, its loss on ready embeddings, BatchNorm frozen half way, and the paper's size."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from index.errors import InvalidArgument
from index.version import EdgeKind
from naive import log_softmax
from tensors import draw
from training.losses.losses import UNKNOWN
from training.method import Classifier, EmbeddedBatch, MethodContext, OldSummary
from training.methods.fct import Fct, ForwardNetwork
from training.networks.heads import Softmax

CLASSES, OLD_DIM, DIM = 4, 3, 5
LABELS = torch.tensor([0, 1, 2, 3, 0, 2])
HEAD = (draw(CLASSES, DIM, seed=11), draw(CLASSES, seed=12))


def build(
    space: str = "cosine",
    old_space: str = "cosine",
    *,
    old_side: int = 0,
    side: int = 0,
    bits: bool = False,
    uncertainty: bool = False,
    head: tuple[Tensor, Tensor | None] = HEAD,
    **options: object,
) -> Fct:
    torch.manual_seed(0)
    unknown = torch.full((CLASSES,), UNKNOWN)
    old = OldSummary(draw(CLASSES, OLD_DIM, seed=5), unknown, space=old_space, side_dim=old_side)
    context = MethodContext(
        DIM, CLASSES, lambda d: Classifier(Softmax(d, CLASSES)), old, space, side, bits, independent_head=head
    )
    return Fct(context, branch=8, trunk=8, uncertainty=uncertainty, **options)


def batch(progress: float = 0.0) -> EmbeddedBatch:
    new_BD, old_BN = draw(6, DIM, seed=1).requires_grad_(), draw(6, OLD_DIM, seed=2).requires_grad_()
    return EmbeddedBatch(new_BD, LABELS, old_BN, progress=progress)


@pytest.mark.parametrize("old_space", ["cosine", "l2"])
@pytest.mark.parametrize("space", ["cosine", "l2"])
def test_the_loss_compares_embeddings_as_they_are_stored(space: str, old_space: str) -> None:
    method, given = build(space, old_space).eval(), batch()
    assert given.old_BN is not None
    stored = F.normalize(given.old_BN) if old_space == "cosine" else given.old_BN
    wanted = F.normalize(given.new_BD) if space == "cosine" else given.new_BD
    made = method.edge(stored)

    assert method(given).loss.item() == pytest.approx(((made - wanted) ** 2).mean().item(), rel=1e-5)
    if space == "cosine":
        torch.testing.assert_close(made.norm(dim=1), torch.ones(6))


@pytest.mark.parametrize("space", ["cosine", "l2"])
def test_the_objective_kl_compares_what_the_new_head_says_of_both(space: str) -> None:
    method, given = build(space, objective="kl").eval(), batch()
    made = method.edge(F.normalize(given.old_BN))
    terms = []
    for mine, wanted in zip(made.tolist(), given.new_BD.tolist(), strict=True):
        said = []
        for z in (mine, wanted):
            inner = [sum(a * b for a, b in zip(z, row, strict=True)) for row in HEAD[0].tolist()]
            lengths = [math.hypot(*z) * math.hypot(*row) for row in HEAD[0].tolist()]
            cosines = [16 * x / length for x, length in zip(inner, lengths, strict=True)]
            raw = [x + b for x, b in zip(inner, HEAD[1].tolist(), strict=True)]
            said.append(log_softmax(cosines if space == "cosine" else raw))
        terms.append(sum(math.exp(p) * (p - q) for q, p in zip(*said, strict=True)))

    step = method(given)
    assert step.loss.item() == pytest.approx(sum(terms) / len(terms), rel=1e-4)
    step.loss.backward()
    assert given.new_BD.grad is None


def test_the_objective_kl_needs_a_head_and_no_variance() -> None:
    method = build(objective="kl")
    method.head_CD = None
    with pytest.raises(InvalidArgument, match="objective=kl requires an independent version with a linear head"):
        method(batch())
    with pytest.raises(InvalidArgument, match="uncertainty requires objective=square"):
        build(objective="kl", uncertainty=True)


def test_the_objective_kl_refuses_a_head_of_directions_where_lengths_count() -> None:
    with pytest.raises(
        InvalidArgument, match="objective=kl in space l2 requires an independent version with head=softmax"
    ):
        build("l2", objective="kl", head=(HEAD[0], None))
    assert build("l2", objective="square", head=(HEAD[0], None))(batch()).loss.isfinite()
    assert build("cosine", objective="kl", head=(HEAD[0], None))(batch()).loss.isfinite()


def test_only_the_transform_learns() -> None:
    method, given = build(), batch()
    method(given).loss.backward()

    assert given.new_BD.grad is None
    assert all(p.grad is not None for p in method.edge.parameters())
    assert {name.split(".")[0] for name, _ in method.named_parameters()} == {"edge"}
    assert not method.trains_encoder
    assert method.edge_kind is EdgeKind.FORWARD


def test_batch_norm_statistics_stop_half_way_and_stay_stopped() -> None:
    method = build().train()
    norm = next(m for m in method.modules() if isinstance(m, nn.BatchNorm1d))
    method(batch(progress=0.4))
    before = norm.running_mean.clone()
    method(batch(progress=0.6))

    assert not torch.equal(before, torch.zeros_like(before))
    assert torch.equal(norm.running_mean, before)
    assert not norm.training
    assert not method.train().edge.old[1].training  # Lightning switches to train mode again and again


def test_side_information_enters_by_its_own_branch() -> None:
    made = ForwardNetwork(OLD_DIM, 2, DIM, 8, 8, unit=True).eval()
    old, side = draw(6, OLD_DIM, seed=1), draw(6, 2, seed=2)

    assert made(old, side).shape == (6, DIM)
    assert not torch.allclose(made(old, side), made(old, -side))


@pytest.mark.parametrize("bits", [False, True])
def test_g_learns_the_next_side_information_out_of_the_same(bits: bool) -> None:
    method, given = build(old_side=2, side=4, bits=bits).eval(), batch()
    old_side, next_side = draw(6, 2, seed=3), F.normalize(draw(6, 4, seed=4))
    next_side = next_side.sign() if bits else next_side
    given = replace(given, old_side_BS=old_side, side_BT=next_side)
    assert given.old_BN is not None
    stored = F.normalize(given.old_BN)
    assert method.edge.g is not None
    raw = method.edge.g(stored, old_side)
    told = method.edge.transform_items(stored, old_side)
    expected = ((told["moved"] - F.normalize(given.new_BD)) ** 2).mean() + ((raw - next_side) ** 2).mean()

    torch.testing.assert_close(method(given).loss, expected)
    assert list(told) == ["moved", "next_side"]
    torch.testing.assert_close(told["next_side"], torch.where(raw > 0, 1.0, -1.0) if bits else raw)
    if not bits:
        torch.testing.assert_close(raw.norm(dim=1), torch.ones(6))


def test_uncertainty_learns_by_likelihood_and_tells_a_variance_of_each_item() -> None:
    method, given = build(uncertainty=True).eval(), batch()
    assert given.old_BN is not None
    told = method.edge.transform_items(F.normalize(given.old_BN))
    square = ((told["moved"] - F.normalize(given.new_BD)) ** 2).mean(1)
    variance = told["variance"][:, 0]

    torch.testing.assert_close(method(given).loss, 0.5 * (square / variance + variance.log()).mean())
    assert told["variance"].shape == (6, 1)
    assert (told["variance"] > 0).all()
    torch.testing.assert_close(method(given).logging["square"], square.mean())


def test_the_learned_variance_is_larger_where_items_are_harder_to_move() -> None:
    method = build(uncertainty=True).train()
    old = draw(256, OLD_DIM, seed=6)
    noise = draw(256, DIM, seed=7) * (old[:, :1] > 0)  # what the old embedding cannot know, for half of the items
    given = EmbeddedBatch(F.pad(old, (0, DIM - OLD_DIM)) + 3 * noise, torch.zeros(256, dtype=torch.long), old)
    optimiser = torch.optim.Adam(method.parameters(), 1e-2)
    for _ in range(60):
        optimiser.zero_grad()
        method(given).loss.backward()
        optimiser.step()
    variance = method.eval().edge.transform_items(F.normalize(old))["variance"][:, 0]

    assert variance[old[:, 0] > 0].median() > 3 * variance[old[:, 0] <= 0].median()


def test_g_fixes_its_statistics_with_h() -> None:
    method = build(old_side=2, side=4).train()
    given = replace(batch(progress=0.6), old_side_BS=draw(6, 2, seed=3), side_BT=draw(6, 4, seed=4))
    method(given)

    assert not any(m.training for m in method.modules() if isinstance(m, nn.BatchNorm1d))


def test_at_the_papers_sizes_the_transform_has_its_5_7_million_parameters() -> None:
    made = ForwardNetwork(128, 128, 128, 256, 2048, unit=False)

    assert sum(p.numel() for p in made.parameters()) == pytest.approx(5.7e6, rel=0.02)
