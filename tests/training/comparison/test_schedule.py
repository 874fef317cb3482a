"""What a comparison trains and measures, what it refuses, and that trainings side by side are those of one by one."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

import pytest

from index.errors import InvalidArgument, RegraftError
from index.version import CARD
from index.version_folder.folder import card_sha256
from staging.inputs.recipes import without_exporter
from staging.processes.children import forking_instead_of_spawning
from staging.waiting import until
from training.comparison import runs as comparison
from training.comparison import schedule
from training.comparison.provenance import write_note
from training.comparison.runs import COMPARED_FAMILIES, Run, runs_of
from training.comparison.schedule import compare_methods
from training.fitting import checkpoint_of
from training.folder_lock import FolderInUse
from training.recipes import Recipe, find_recipe
from training.train import recipe_data
from training.train import train as train_version

START = 1200
"""Seconds in which processes import torch and train an epoch, also on a busy machine; they are waited for no longer."""
FEW = ["epochs=1", "warmup_epochs=0", "batch_size=256"]


def one_run(folder: Path, *settings: str) -> Run:
    (run,) = runs_of(COMPARED_FAMILIES["digits"], folder, 1, [*FEW, "threads=1", *settings])
    return run


def compared(folder: Path, parts: list[str], *settings: str, overwrite: bool = False, jobs: int = 1) -> list[str]:
    said: list[str] = []
    runs = runs_of(COMPARED_FAMILIES["digits"], folder, 1, [*FEW, *settings])
    with without_exporter():
        compare_methods(runs, parts, lambda: None, said.append, overwrite=overwrite, jobs=jobs)
    return [text.partition(": ")[2] for text in said]


def test_a_row_beside_an_old_version_that_was_trained_anew_is_measured_again(tmp_path: Path) -> None:
    (run,) = runs_of(COMPARED_FAMILIES["digits"], tmp_path, 1, FEW)
    compared(tmp_path, ["v1", "independent"])
    assert run.results("independent") is not None
    compared(tmp_path, ["v1"], "v1.epochs=2", overwrite=True)
    assert run.results("independent") is None
    said = compared(tmp_path, ["v1", "independent"], "v1.epochs=2")

    assert run.results("independent") is not None
    assert [text.split()[0] for text in said] == ["digits_independent"]


def test_versions_of_other_settings_are_not_replaced_unasked(tmp_path: Path) -> None:
    (run,) = runs_of(COMPARED_FAMILIES["digits"], tmp_path, 1, FEW)
    compared(tmp_path, ["v1", "l2"])
    kept = card_sha256(run.version_folder("l2"))
    with pytest.raises(InvalidArgument, match=r"digits_v1 exists but was trained without preprocess\.height=9; "):
        compared(tmp_path, ["v1", "l2"], "preprocess.height=9")
    with pytest.raises(InvalidArgument, match=r"digits_l2 exists but was trained without epochs=2, weight=3\.0; "):
        compared(tmp_path, ["independent", "v1", "l2"], "l2.epochs=2", "l2.weight=3")
    assert not run.version_folder("independent").exists()
    assert compared(tmp_path, ["v1", "l2"], "workers=1") == []
    assert card_sha256(run.version_folder("l2")) == kept

    # A reference that is gone may come back as it was; a version against another one is refused.
    shutil.rmtree(run.version_folder("v1"))
    with pytest.raises(InvalidArgument, match="digits_l2 exists but was trained without these references; "):
        compared(tmp_path, ["v1", "l2"], "v1.epochs=2")
    run.version_folder("l2").with_suffix(".json").unlink()
    with pytest.raises(InvalidArgument, match="digits_l2 exists but was trained without a note of its recipe"):
        compared(tmp_path, ["v1", "l2"], "v1.epochs=2")
    assert len(compared(tmp_path, ["v1", "l2"], "v1.epochs=2", overwrite=True)) == 2


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("bt2.epochs=0", "digits_bt2: epochs of digits_bt2 must be 1 or more, not 0"),
        ("milestones=1", "digits_v1: milestones must rise from 1 to below epochs=1"),
        ("oca.dim=16", "digits_oca: oca's dim must be the old dimension plus extra ones, so above 16, not 16"),
        ("v1.dim=24", "digits_bt2: bt2's dim must be the independent dimension 16 plus the old one 24, so 40"),
        ("independent.dim=8", "digits_bt2: bt2's dim must be the independent dimension 8 plus the old one 16"),
        ("bct.logits=flat", "digits_bct: logits must be one of unit, head, cosine, raw, not 'flat'"),
    ],
)
def test_a_setting_that_a_later_part_cannot_be_trained_with_is_refused_before_the_first_is_trained(
    setting: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(message)):
        compared(tmp_path, ["v1", "independent", "bct", "bt2", "oca"], setting)
    assert not any(tmp_path.rglob("*"))


def test_a_comparison_leaves_nothing_in_a_version_folder(tmp_path: Path) -> None:
    (tmp_path / CARD).write_text("{}")

    with pytest.raises(InvalidArgument, match="is inside a version folder"):
        compared(tmp_path, ["v1"])
    assert [path.name for path in tmp_path.iterdir()] == [CARD]


def test_a_version_whose_note_could_not_be_written_is_not_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_first(path: Path, note: dict[str, Any]) -> None:
        if "seconds" in note:
            raise OSError("the disk is full")
        write_note(path, note)

    with monkeypatch.context() as full:
        full.setattr(comparison, "write_note", write_first)
        with pytest.raises(OSError, match="full"):
            compared(tmp_path, ["v1"])

    (said,) = compared(tmp_path, ["v1"])
    assert said.startswith("digits_v1: CMC-1")


def test_a_version_that_another_process_begins_to_train_meanwhile_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Path] = []

    def train(recipe: Recipe, out: Path, **options: Any) -> Path:
        tried.append(out)
        if len(tried) == 1:
            raise FolderInUse(out)
        return train_version(recipe, out, **options)

    monkeypatch.setattr(comparison, "train", train)

    assert compared(tmp_path, ["v1"])[-1].startswith("digits_v1 after ")
    assert len(tried) == 2


def test_a_comparison_warns_of_repeated_images_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    data = recipe_data(find_recipe("digits_v1"))
    leak = replace(data, train=data.query)
    monkeypatch.setattr(comparison, "recipe_data", lambda _: leak)
    compared(tmp_path, ["v1", "independent"])

    (warned,) = (text for text in caplog.messages if "trained on" in text)
    assert warned.startswith(f"{len(data.query)} of {len(data.query) + len(data.gallery)} test images")


@pytest.mark.parametrize("jobs", [1, 2])
def test_what_depends_on_a_version_that_diverged_is_skipped_whatever_an_earlier_call_left(
    jobs: int, tmp_path: Path
) -> None:
    compared(tmp_path, ["v1", "bct"])
    diverging = ["v1.rate=1e30", "v1.optimiser=sgd", "v1.epochs=2"]
    with forking_instead_of_spawning():
        said = compared(tmp_path, ["v1", "bct"], *diverging, overwrite=True, jobs=jobs)
    (run,) = runs_of(COMPARED_FAMILIES["digits"], tmp_path, 1, [])

    assert said[-1] == "digits_bct has no row: v1, which it requires, could not be trained"
    assert [run.results(part) for part in ("v1", "bct")] == [None, None]
    assert run.needs("bt2") == ["v1", "independent"]


def test_trainings_side_by_side_give_the_results_of_one_after_another(tmp_path: Path) -> None:
    parts = ["v1", "independent", "l2"]
    alone, beside = one_run(tmp_path / "alone"), one_run(tmp_path / "beside")
    ended: list[int] = []
    said: list[str] = []
    with without_exporter(), forking_instead_of_spawning():
        compare_methods([alone], parts, lambda: None, said.append)
        compare_methods([beside], parts, lambda: ended.append(len(said)), said.append, jobs=2)

    for part in parts:
        one, other = alone.results(part), beside.results(part)
        assert one
        assert other
        assert {name: x.tolist() for name, x in one.items()} == {name: x.tolist() for name, x in other.items()}
    assert len(ended) == 3
    said.clear()
    compare_methods([beside], parts, lambda: None, said.append, jobs=2)
    assert said == []


def test_side_by_side_is_ready_for_all_that_nothing_unfinished_is_needed_for(tmp_path: Path) -> None:
    run = one_run(tmp_path)
    v1, independent, bct, bt2 = (schedule.Task(run, part, False) for part in ("v1", "independent", "bct", "bt2"))
    both = {v1.key, independent.key}

    assert pickle.loads(pickle.dumps(v1)) == v1  # so that a spawned process can be given it
    assert [task.is_ready(both) for task in (v1, independent, bct, bt2)] == [True, True, False, False]
    assert [task.can_be_measured(both) for task in (v1, independent)] == [True, False]
    assert [task.is_ready({independent.key}) for task in (bct, bt2)] == [True, False]
    with without_exporter():
        independent.carry_out(comparison.DataCache(), str, measure=False)
    assert (independent.is_ready(both), independent.is_ready({bct.key})) == (False, True)


def test_a_training_whose_process_dies_is_named(tmp_path: Path) -> None:
    ours, its = get_context("spawn").Pipe(duplex=False)
    process = get_context("spawn").Process(target=os._exit, args=(9,))
    process.start()
    its.close()

    with pytest.raises(RegraftError, match="that trained digits_v1 ended with exit code 9"):
        schedule._Training(schedule.Task(one_run(tmp_path), "v1", False), process, ours).hear(str)


def group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.timeout(3 * START)
def test_trainings_side_by_side_end_with_the_command_however_it_ends(tmp_path: Path) -> None:
    long = one_run(tmp_path, "epochs=100000")
    checkpoints = [checkpoint_of(long.version_folder(part)) for part in ("v1", "independent")]

    def begun() -> bool:
        return all(path.is_file() for path in checkpoints)

    ended = threading.Event()

    def interrupt_once_begun() -> None:
        with suppress(AssertionError):
            until(lambda: begun() or ended.is_set(), seconds=START)
        if not ended.is_set():
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt_once_begun).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            compare_methods([long], ["v1", "independent"], lambda: None, str, jobs=2)
    finally:
        ended.set()
    assert begun()
    assert active_children() == []

    for path in checkpoints:
        path.unlink()
    code = (
        "from pathlib import Path; from training.comparison.runs import *; from training.comparison.schedule import *\n"
        f"runs = runs_of(COMPARED_FAMILIES['digits'], Path({str(tmp_path)!r}), 1, {list(long.settings)!r})\n"
        "if __name__ == '__main__': compare_methods(runs, ['v1', 'independent'], print, jobs=2)"
    )
    script = tmp_path / "compare.py"
    script.write_text(code)
    killed = subprocess.Popen([sys.executable, script], start_new_session=True)
    try:
        until(begun, killed, seconds=START)
    finally:
        killed.kill()
    killed.wait()
    until(lambda: not group_lives(killed.pid))
