"""Two CPU processes train one version together, as `torchrun` starts them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from index.encoders.encoder import verify_version
from index.errors import InvalidArgument
from training import train as path
from training.comparison.runs import COMPARED_FAMILIES, runs_of
from training.comparison.schedule import compare_methods
from training.comparison.sweep import sweep
from training.recipes import find_recipe
from training.trained import WEIGHTS, Trained

ROOT = Path(__file__).parents[2]
PROCESS = """
import sys
from dataclasses import replace
from pathlib import Path
import torch
from training import processes, train as path
from training.recipes import find_recipe

torch.set_num_threads(1)
place, writes, fit, write = Path(sys.argv[1]), [], path.fit, path.write_version

def watched(module, *arguments, **named):
    fit(module, *arguments, **named)
    torch.save({name: p.detach() for name, p in module.named_parameters()}, place / f"rank{processes.rank()}.pt")

path.fit = watched
path.write_version = lambda *arguments: (writes.append(1), write(*arguments))
recipe = replace(find_recipe("digits_hot_refresh"), epochs=3, warmup_epochs=0, batch_size=128, old=sys.argv[2])
path.train(recipe, place / "v", progress=False)
assert (place / "v" / "card.json").is_file(), "left before the version was there"
(place / f"writes{processes.rank()}").write_text(str(len(writes)))
processes.leave_group()
"""

MEETING = """
import datetime, sys, time
from pathlib import Path
import torch.distributed as dist
from training import processes

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=1))
with processes.barrier_after():
    if processes.is_rank_zero():
        time.sleep(3)
        Path(sys.argv[1]).touch()
assert Path(sys.argv[1]).exists(), "left before the first one was done"
processes.leave_group()
"""

DIVERGING = """
import sys
from dataclasses import replace
from pathlib import Path
from training import processes, train as path
from training.divergence import Diverged
from training.module import Training
from training.recipes import find_recipe

step = Training.step

def spoiled(module, drawn):
    made = step(module, drawn)
    return replace(made, loss=made.loss * float("nan")) if processes.rank() == 1 else made

Training.step = spoiled
try:
    path.train(replace(find_recipe("digits_v1"), epochs=1, warmup_epochs=0), Path(sys.argv[1]) / "v", progress=False)
except Diverged:
    processes.leave_group()
    sys.exit()
sys.exit("did not diverge")
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("processes")
    run_two(PROCESS, str(place), str(ROOT / "examples/v1"))
    return place


def run_two(code: str, *arguments: str) -> None:
    """Two processes of one group, as `torchrun` starts them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared |= {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0", "PYTHONPATH": str(ROOT)}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            env={**os.environ, **shared, "RANK": rank, "LOCAL_RANK": rank},
            cwd=ROOT,
            stderr=subprocess.PIPE,
        )
        for rank in ("0", "1")
    ]
    for process in running:
        _, stderr = process.communicate(timeout=200)
        assert process.returncode == 0, stderr.decode()


def test_what_each_of_several_processes_would_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InvalidArgument, match="a sweep must run in one process"):
        sweep(find_recipe("digits_l2"), 2, tmp_path)
    with pytest.raises(InvalidArgument, match="a comparison of methods must run in one process"):
        compare_methods(runs_of(COMPARED_FAMILIES["digits"], tmp_path, 1, []), ["v1"], lambda: None)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_others_wait_for_the_first_one_longer_than_their_group_does(tmp_path: Path) -> None:
    run_two(MEETING, str(tmp_path / "done"))


@pytest.mark.slow
def test_a_loss_that_diverges_in_one_process_ends_both_alike(tmp_path: Path) -> None:
    run_two(DIVERGING, str(tmp_path))

    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_both_end_with_the_same_weights_and_the_first_one_writes_them_once(place: Path) -> None:
    first, second = (torch.load(place / f"rank{rank}.pt") for rank in range(2))

    assert first
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert [(place / f"writes{rank}").read_text() for rank in range(2)] == ["1", "0"]
    assert {found.name for found in place.glob("v*")} == {"v"}
    verify_version(place / "v")
    written = dict(Trained.load(place / "v").named_parameters())
    assert torch.equal(written["raw.0.embed.weight"], first["backbone.embed.weight"])


@pytest.mark.slow
def test_two_processes_learn_what_one_learns(place: Path, tmp_path: Path) -> None:
    """They see the same batches; only BatchNorm, which averages over a process's own half, tells them apart."""
    recipe = replace(find_recipe("digits_hot_refresh"), epochs=3, warmup_epochs=0, batch_size=128)
    alone = path.train(replace(recipe, old=str(ROOT / "examples/v1")), tmp_path / "v", progress=False)
    scores = [Trained.load(f).version.card.metrics["new/new"]["mAP@1.0"]["value"] for f in (alone, place / "v")]

    assert (alone / WEIGHTS).read_bytes() != (place / "v" / WEIGHTS).read_bytes()
    np.testing.assert_allclose(scores[0], scores[1], atol=0.1)
