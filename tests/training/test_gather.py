"""A loss over the gathered batch of two processes trains like one process that holds the whole batch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from training.contrasts import masked_alignment, regression_alleviating
from training.contrasts import rince as hyperbolic
from training.gather import gather_batch
from training.method import EmbeddedBatch

LOSSES = {
    "regression_alleviating": lambda new, old, label: regression_alleviating(new, old, label, 0.1),
    "masked_alignment": lambda new, old, label: masked_alignment(new, old, label, 10.0),
    "rince": lambda new, old, _: hyperbolic(new, old),
}

PROCESS = """
import sys
import torch
import torch.distributed as dist
from torch.nn.functional import linear
from training import contrasts
from training.gather import gather_batch
from training.method import EmbeddedBatch

torch.set_num_threads(1)
place, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{place}/meeting", rank=rank, world_size=2)
given = torch.load(f"{place}/given.pt")
mine = slice(4 * rank, 4 * rank + 4)
found = {}
for name in ("regression_alleviating", "masked_alignment", "rince"):
    weight = given["weight"].clone().requires_grad_()
    new = linear(given["x"][mine], weight)
    batch = gather_batch(EmbeddedBatch(new, given["label"][mine], given["old"][mine]))
    assert torch.equal(batch.label_B, given["label"]) and batch.independent_BM is None
    extra = {"regression_alleviating": (batch.label_B, 0.1), "masked_alignment": (batch.label_B, 10.0), "rince": ()}
    loss = getattr(contrasts, name)(batch.new_BD, batch.old_BN, *extra[name])
    loss.backward()
    dist.all_reduce(weight.grad)  # what DDP does, then divides by the number of processes
    found[name] = (loss.detach(), weight.grad / 2)
torch.save(found, f"{place}/found{rank}.pt")
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def given() -> dict[str, Tensor]:
    torch.manual_seed(0)
    label = torch.tensor([0, 1, 2, 0, 1, 1, 3, 2])
    return {"x": torch.randn(8, 5), "weight": torch.randn(3, 5), "old": torch.randn(8, 3), "label": label}


@pytest.fixture(scope="module")
def found(given: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[Tensor, Tensor]]]:
    place = tmp_path_factory.mktemp("gather")
    torch.save(given, place / "given.pt")
    root = Path(__file__).parents[2]
    running = [
        subprocess.Popen([sys.executable, "-c", PROCESS, str(place), str(rank)], cwd=root, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    for process in running:
        _, stderr = process.communicate(timeout=120)
        assert process.returncode == 0, stderr.decode()
    return [torch.load(place / f"found{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", LOSSES)
def test_two_processes_give_the_loss_and_gradient_of_one(
    name: str, given: dict[str, Tensor], found: list[dict[str, tuple[Tensor, Tensor]]]
) -> None:
    weight = given["weight"].clone().requires_grad_()
    loss = LOSSES[name](given["x"] @ weight.T, given["old"], given["label"])
    loss.backward()

    assert weight.grad is not None
    for rank in range(2):
        torch.testing.assert_close(found[rank][name], (loss.detach(), weight.grad))


def test_one_process_keeps_its_batch() -> None:
    batch = EmbeddedBatch(torch.ones(2, 3), torch.zeros(2, dtype=torch.long))

    assert gather_batch(batch) is batch
    assert gather_batch(replace(batch, progress=0.5)).progress == 0.5
