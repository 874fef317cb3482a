"""A loss over the gathered batch of two processes trains like one process that holds the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear

from staging.processes.children import child
from training.losses.contrasts import masked_alignment, regression_alleviating
from training.losses.contrasts import rince as hyperbolic
from training.losses.gather import gather_batch
from training.losses.losses import UNKNOWN
from training.method import Classifier, EmbeddedBatch, MethodContext, OldSummary
from training.methods.advbct import AdvBct
from training.methods.bct import Bct
from training.methods.compatible import Compatible
from training.methods.l2 import L2
from training.methods.lwf import Lwf
from training.networks.heads import Softmax


def of_pairs(loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[EmbeddedBatch], Tensor]:
    def gathered(batch: EmbeddedBatch) -> Tensor:
        whole = gather_batch(batch)
        assert whole.old_BN is not None
        return loss(whole.new_BD, whole.old_BN, whole.label_B)

    return gathered


def influence(build: Callable[..., Compatible], **options: str) -> Callable[[EmbeddedBatch], Tensor]:
    """Of a method that averages over a part of the batch: classes 0 and 1 are old, 1 and 2 have boundaries in reach."""
    centre, known = torch.eye(4, 3), torch.tensor([0, 1, UNKNOWN, UNKNOWN])
    radius = torch.tensor([9.0, 0.1, 0.2, 9.0])
    old = OldSummary(centre, known, centre[:2], torch.zeros(2), centre_CN=centre, radius_C=radius)
    method = build(MethodContext(3, 4, lambda dim: Classifier(Softmax(dim, 4)), old), **options)
    if isinstance(method, AdvBct):
        torch.nn.init.zeros_(method.elastic_C)
    return method.influence_loss


LOSSES = {
    "regression_alleviating": of_pairs(lambda new, old, label: regression_alleviating(new, old, label, 0.1)),
    "masked_alignment": of_pairs(lambda new, old, label: masked_alignment(new, old, label, 10.0)),
    "rince": of_pairs(lambda new, old, _: hyperbolic(new, old)),
    "l2 over old": influence(L2, over="old"),
    "lwf": influence(Lwf),
    "bct by old": influence(Bct, influence="old"),
    "advbct": influence(AdvBct),
}


def one_of_two(place: Path, rank: int) -> None:
    """What one process finds on its half of the batch."""
    dist.init_process_group("gloo", init_method=f"file://{place}/meeting", rank=rank, world_size=2)
    given = torch.load(place / "given.pt")
    mine = slice(4 * rank, 4 * rank + 4)
    found = {}
    for name, loss_of in LOSSES.items():
        weight = given["weight"].clone().requires_grad_()
        new = linear(given["x"][mine], weight)
        batch = EmbeddedBatch(new, given["label"][mine], given["old"][mine])
        whole = gather_batch(batch)
        assert torch.equal(whole.label_B, given["label"])
        assert whole.independent_BM is None
        loss = loss_of(batch)
        loss.backward()
        assert weight.grad is not None
        dist.all_reduce(weight.grad)  # what DDP does, then divides by the number of processes
        found[name] = (loss.detach(), weight.grad / 2)
    torch.save(found, place / f"found{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def given() -> dict[str, Tensor]:
    torch.manual_seed(0)
    label = torch.tensor([0, 1, 2, 0, 1, 1, 3, 2])
    return {"x": torch.randn(8, 5), "weight": torch.randn(3, 5), "old": torch.randn(8, 3), "label": label}


@pytest.fixture(scope="module")
def found(given: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[Tensor, Tensor]]]:
    place = tmp_path_factory.mktemp("gather")
    torch.save(given, place / "given.pt")
    running = [child(one_of_two, place, rank) for rank in range(2)]
    for process in running:
        process.join(120)
        assert process.exitcode == 0
    return [torch.load(place / f"found{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", LOSSES)
def test_two_processes_give_the_loss_and_gradient_of_one(
    name: str, given: dict[str, Tensor], found: list[dict[str, tuple[Tensor, Tensor]]]
) -> None:
    weight = given["weight"].clone().requires_grad_()
    loss = LOSSES[name](EmbeddedBatch(given["x"] @ weight.T, given["label"], given["old"]))
    loss.backward()

    assert weight.grad is not None
    for rank in range(2):
        torch.testing.assert_close(found[rank][name], (loss.detach(), weight.grad))


def test_one_process_keeps_its_batch() -> None:
    batch = EmbeddedBatch(torch.ones(2, 3), torch.zeros(2, dtype=torch.long))

    assert gather_batch(batch) is batch
    assert gather_batch(replace(batch, progress=0.5)).progress == 0.5
