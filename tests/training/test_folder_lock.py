"""Two trainings and one folder: the second is refused, or waits and uses what the first one wrote."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from staging.inputs.recipes import quick
from training import folder_lock
from training import train as path
from training.fitting import checkpoint_of
from training.folder_lock import FolderInUse, lock_file, lock_folder


def test_a_folder_that_somebody_trains_into_is_refused_and_nothing_is_left_of_the_lock(tmp_path: Path) -> None:
    out = tmp_path / "runs" / "v"
    with lock_folder(out):
        assert lock_file(out).is_file()
        with pytest.raises(FolderInUse, match=r"runs/v; wait for it, or choose another folder with --out"):
            path.train(quick("digits_v1"), out, progress=False)
        with pytest.raises(FolderInUse):
            path.wait_for_training(out, print)

    assert list(tmp_path.iterdir()) == []


def test_a_killed_training_leaves_a_lock_that_holds_nobody_off_and_what_it_wrote_goes(tmp_path: Path) -> None:
    lock_file(tmp_path / "v").touch()
    (tmp_path / ".v.abcd_123" / "new").mkdir(parents=True)
    with lock_folder(tmp_path / "v"):
        (tmp_path / "v").mkdir()

    assert [found.name for found in tmp_path.iterdir()] == ["v"]


def write_card(out: Path, text: str) -> None:
    out.mkdir(exist_ok=True)
    (out / "card.json").write_text(text)


# Python 3.12 warns of it beside threads: the children here do no more than hold a lock.
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize(
    ("before", "then", "left"),
    [
        ("", "", {"v.checkpoint", "v-psi.checkpoint"}),
        ("", "new", {"v"}),
        ("old", "", {"v", "v.checkpoint", "v-psi.checkpoint"}),
        ("old", "new", {"v"}),
    ],
)
def test_what_a_killed_training_left_goes_but_for_what_it_can_resume_from(
    before: str, then: str, left: set[str], tmp_path: Path
) -> None:
    out = tmp_path / "v"
    if before:
        write_card(out, before)
    training = os.fork()
    if not training:
        with lock_folder(out):
            checkpoint_of(out).touch()
            checkpoint_of(path.psi_of(out)).touch()
            (tmp_path / ".v.abcd_123" / "new").mkdir(parents=True)
            if then:
                write_card(out, then)
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(training, 0)
    assert lock_file(out).is_file()
    path.wait_for_training(out, print)

    assert {found.name for found in tmp_path.iterdir()} == left


# Python 3.12 warns of it beside threads: the children here do no more than hold a lock.
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_killed_training_can_go_on_while_a_worker_of_it_is_left(tmp_path: Path) -> None:
    heard, told = os.pipe()
    training = os.fork()
    if not training:
        with lock_folder(tmp_path / "v"):
            if not os.fork():
                os.write(told, str(os.getpid()).encode())
            signal.pause()
    worker = int(os.read(heard, 16))
    os.kill(training, signal.SIGKILL)
    os.waitpid(training, 0)
    try:
        assert lock_file(tmp_path / "v").is_file()
        with lock_folder(tmp_path / "v"):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)
        os.close(heard)
        os.close(told)


def test_a_reference_that_somebody_else_trains_is_waited_for_and_then_used(
    v1: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, held, said = tmp_path / "digits_v1", threading.Event(), threading.Event()
    monkeypatch.setattr("training.references.RUNS", tmp_path)
    monkeypatch.setattr(path, "train", lambda *_: pytest.fail("trained twice"))
    monkeypatch.setattr(folder_lock, "_held_locks", {})  # as in another process

    def elsewhere() -> None:
        with lock_folder(out):
            folder_lock._held_locks.clear()
            held.set()
            said.wait(0.3)
            out.symlink_to(v1)

    other = threading.Thread(target=elsewhere)
    other.start()
    held.wait()
    found = path.ensure_trained("old", quick("digits_v1"), progress=True)
    other.join()

    assert found == out
    assert capsys.readouterr().out.splitlines() == [
        f"waiting for another process that trains {out}",
        f"using {out} unchanged",
    ]
