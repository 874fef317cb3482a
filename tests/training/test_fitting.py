"""Trainings that are killed, stopped or short of disk; precision, logs, cached embeddings, and the losses."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from index.errors import InvalidArgument, Unwritable
from index.version_folder.folder import load_version
from regraft.cli import app
from staging.inputs.recipes import quick, without_exporter
from staging.processes.children import child
from training import fitting
from training import train as path
from training.data.images import Data
from training.divergence import Diverged
from training.fitting import changes, checkpoint_of, identity, logs_of
from training.module import BaseTraining, Training
from training.recipes import find_recipe
from training.trained import WEIGHTS, Trained

ROOT = Path(__file__).parents[2]
RECIPE = replace(find_recipe("digits_independent"), epochs=4, warmup_epochs=1, batch_size=128, augment="shift")

Step = Callable[[Training, Any, int], Tensor]


def weights(folder: Path) -> bytes:
    return (folder / WEIGHTS).read_bytes()


def left(place: Path) -> set[str]:
    return {found.name for found in place.iterdir()}


@pytest.fixture(scope="module", autouse=True)
def interruptible() -> Iterator[None]:
    """A shell starts its background jobs with SIGINT ignored, and the suite may be one."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module", autouse=True)
def without_onnx() -> Iterator[None]:
    """Its export takes seconds, and training does not depend on it."""
    with without_exporter():
        yield


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return path.train(RECIPE, tmp_path_factory.mktemp("undisturbed") / "v", progress=False)


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, Callable[[], None]], list[int]]]:
    """Do something, once, at a step of the next training; gives the steps that were made."""

    def arrange(when: int, act: Callable[[], None]) -> list[int]:
        made: list[int] = []
        step: Step = Training.training_step

        def watched(module: Training, batch: Any, place: int) -> Tensor:
            made.append(module.trainer.global_step)
            if made == list(range(when + 1)):
                act()
            return step(module, batch, place)

        monkeypatch.setattr(Training, "training_step", watched)
        return made

    yield arrange
    monkeypatch.undo()


def never() -> None:
    raise AssertionError


def interrupt(by: signal.Signals = signal.SIGINT) -> None:
    os.kill(os.getpid(), by)


def train_and_die(out: Path) -> None:
    step: Step = Training.training_step

    def mortal(module: Training, batch: Any, place: int) -> Tensor:
        if module.current_epoch == 2 and place == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(module, batch, place)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Training, "training_step", mortal)
        path.train(RECIPE, out, progress=False)


def test_a_training_killed_in_an_epoch_goes_on_to_the_very_same_weights(
    undisturbed: Path, tmp_path: Path, at_step: Any
) -> None:
    out = tmp_path / "v"
    died = child(train_and_die, out)
    died.join(120)
    assert died.exitcode == -signal.SIGKILL
    assert not out.exists()

    made = at_step(-1, never)
    path.train(RECIPE, out, progress=False)

    assert made == list(range(14, 28))  # 7 steps an epoch; the third begins anew
    assert weights(out) == weights(undisturbed)
    assert not checkpoint_of(out).exists()


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_or_sigterm_is_one_line_and_leaves_only_what_is_needed_to_go_on(
    by: signal.Signals, undisturbed: Path, tmp_path: Path, at_step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("training.recipes", "training.recipe_file"):
        monkeypatch.setattr(f"{module}.find_recipe", lambda _: RECIPE)
    out, before = tmp_path / "v", signal.getsignal(signal.SIGINT)
    with pytest.MonkeyPatch.context():
        at_step(17, lambda: interrupt(by))
        stopped = CliRunner().invoke(app, ["train", "mine", "--out", str(out)])

    assert stopped.exit_code == 130
    assert stopped.stderr.strip() == "regraft: stopped; run the same command to continue from the last finished epoch"
    assert left(tmp_path) == {"v.checkpoint", "v-logs"}
    assert signal.getsignal(signal.SIGINT) is before

    monkeypatch.undo()
    path.train(RECIPE, out, progress=False)
    assert weights(out) == weights(undisturbed)


@pytest.mark.parametrize(
    "command", [["train", "digits_v1"], ["sweep", "digits_l2"], ["reproduce", "cifar100-b", "--root", "x"]]
)
def test_sigterm_outside_the_epochs_is_the_same_line(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    for place in ("training.recipe_file.choose", "training.comparison.schedule.compare_methods"):
        monkeypatch.setattr(place, lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))

    stopped = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "v")])

    assert stopped.exit_code == 130
    assert stopped.stderr.strip() == "regraft: stopped; run the same command to continue from the last finished epoch"
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_full_disk_at_export_leaves_the_version_before_and_the_next_start_only_exports(
    undisturbed: Path, tmp_path: Path, at_step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = path.train(replace(RECIPE, epochs=1), tmp_path / "v", progress=False)
    before, write = weights(out), Path.write_bytes

    def full(self: Path, data: bytes) -> int:
        if self.name == WEIGHTS:
            write(self, data[:100])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, data)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(
            Unwritable, match=r"/v could not be written: No space left on device; its previous content is unchanged"
        ):
            path.train(RECIPE, out, progress=False)

    assert left(tmp_path) == {"v", "v.checkpoint"}
    assert weights(out) == before
    load_version(out)

    made = at_step(-1, never)
    path.train(RECIPE, out, progress=False)
    assert made == []
    assert weights(out) == weights(undisturbed)


def test_a_full_disk_at_a_checkpoint_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning import Trainer

    save = Trainer.save_checkpoint

    def full(trainer: Trainer, where: Path) -> None:
        save(trainer, where)
        if trainer.current_epoch == 2:
            where.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Trainer, "save_checkpoint", full)
    with pytest.raises(Unwritable, match=r"v\.checkpoint could not be written: No space left"):
        path.train(RECIPE, tmp_path / "v", progress=False)

    assert left(tmp_path) == {"v.checkpoint"}
    assert torch.load(tmp_path / "v.checkpoint", weights_only=True)["epochs_done"] == 2


def test_a_full_disk_at_the_logs_is_told_as_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.loggers import CSVLogger

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(CSVLogger, "save", full)
    with pytest.raises(Unwritable, match=r"v-logs: No space left on device"):
        path.train(RECIPE, tmp_path / "v")


def test_a_training_whose_loss_is_not_finite_ends_there_and_keeps_the_epochs_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step: Step = Training.training_step

    def diverging(module: Training, batch: Any, place: int) -> Tensor:
        return step(module, batch, place) * (1.0 if module.trainer.global_step < 10 else float("nan"))

    monkeypatch.setattr(Training, "training_step", diverging)
    with pytest.raises(Diverged, match=r"loss is nan in epoch 2, .* a lower rate"):
        path.train(RECIPE, tmp_path / "v", progress=False)

    assert left(tmp_path) == {"v.checkpoint"}
    assert torch.load(tmp_path / "v.checkpoint", weights_only=True)["epochs_done"] == 1


@pytest.mark.parametrize("changed", [{}, {"held_out": 0.2}, {"side": "simclr"}])
def test_a_training_whose_last_step_diverges_ends_before_it_is_measured_or_kept(
    changed: dict[str, Any], tmp_path: Path
) -> None:
    recipe = replace(RECIPE, epochs=1, warmup_epochs=0, batch_size=600, rate=1e30, **changed)
    with pytest.raises(Diverged, match=r"the loss is nan after epoch 1: .* a lower rate"):
        path.train(recipe, tmp_path / "v", progress=False)

    assert left(tmp_path) == set()


def test_embeddings_that_are_not_finite_become_no_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(module: Training, *_: object, **__: object) -> None:
        torch.nn.init.constant_(module.backbone.embed.bias, torch.inf)
        module.eval()

    monkeypatch.setattr(path, "fit", spoiled)
    with pytest.raises(Diverged, match="embeddings are not finite"):
        path.train(RECIPE, tmp_path / "v", progress=False)

    assert left(tmp_path) == set()


def test_a_checkpoint_of_another_training_does_not_count_and_what_differs_is_said(
    undisturbed: Path, tmp_path: Path, at_step: Any, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "v"
    at_step(8, interrupt)
    with pytest.raises(KeyboardInterrupt):
        path.train(replace(RECIPE, seed=9), out, progress=False)
    assert checkpoint_of(out).exists()

    path.train(RECIPE, out, progress=False)
    assert weights(out) == weights(undisturbed)
    assert "is of another training, which differs in seed" in caplog.text


def test_a_training_goes_on_where_its_images_were_moved(
    undisturbed: Path, tmp_path: Path, at_step: Any, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "v"
    at_step(8, interrupt)
    with pytest.raises(KeyboardInterrupt):
        path.train(replace(RECIPE, root="before"), out, progress=False)
    assert checkpoint_of(out).exists()

    path.train(RECIPE, out, progress=False)
    assert weights(out) == weights(undisturbed)
    assert "another training" not in caplog.text


def other_images(data: Data) -> Data:
    return replace(data, train=data.train.take(np.arange(len(data.train))[::-1]))


@pytest.mark.parametrize(
    ("changed", "images", "other"),
    [
        ({"workers": 1}, lambda data: data, ""),
        ({"weights": str(ROOT / "examples/v1")}, lambda data: data, "weights, file of weights"),
        ({}, other_images, "images"),
    ],
)
def test_a_training_is_told_from_others_by_what_decides_its_weights(
    changed: dict[str, Any], images: Callable[[Data], Data], other: str
) -> None:
    data = path.recipe_data(RECIPE)
    one, two = (BaseTraining(recipe) for recipe in (RECIPE, replace(RECIPE, **changed)))

    assert changes(identity(one, data, None), identity(two, images(data), None)) == other


def test_images_are_read_to_tell_trainings_apart_only_once_there_is_a_checkpoint(
    tmp_path: Path, at_step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    identified: list[int] = []
    made = at_step(8, interrupt)
    monkeypatch.setattr(fitting, "identity", lambda *given: identified.append(len(made)) or identity(*given))
    with pytest.raises(KeyboardInterrupt):
        path.train(RECIPE, tmp_path / "v", progress=False)
    path.train(RECIPE, tmp_path / "v", progress=False)

    assert identified == [7, 9], "after the first epoch, and before the second start's first step"


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 half a checkpoint"])
def test_a_damaged_checkpoint_is_one_clear_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "v.checkpoint").write_bytes(content)
    with pytest.raises(InvalidArgument, match=r"v\.checkpoint is damaged, .*remove it to start over"):
        path.train(RECIPE, tmp_path / "v", progress=False)

    assert left(tmp_path) == {"v.checkpoint"}


@pytest.mark.slow
def test_bfloat16_trains_weights_in_float32(tmp_path: Path) -> None:
    recipe = replace(quick("digits_hot_refresh"), old=str(ROOT / "examples/v1"), seed=0, precision="bf16-mixed")
    seen: list[torch.dtype] = []
    forward = torch.nn.Linear.forward

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.Linear, "forward", lambda self, x: _note(seen, forward(self, x)))
        out = path.train(recipe, tmp_path / "v", progress=False)

    assert torch.bfloat16 in seen
    assert all(x.dtype == torch.float32 for x in Trained.load(out).parameters())
    assert load_version(out).card.metrics["new/new"]["cmc@1"]["value"] > 0.6


def _note(seen: list[torch.dtype], made: Tensor) -> Tensor:
    seen.append(made.dtype)
    return made


@pytest.mark.parametrize(
    ("precision", "why"),
    [("half", "precision must be one of 32-true, bf16-mixed, 16-mixed"), ("16-mixed", "requires a GPU")],
)
def test_a_precision_that_cannot_work_is_refused(
    precision: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidArgument, match=why) as refused:
        path.train(replace(RECIPE, precision=precision), tmp_path / "v", progress=False)

    assert refused.value.pointer == "/precision"
    assert left(tmp_path) == set()


def test_logs_lie_beside_the_version_as_csv_and_for_tensorboard(tmp_path: Path) -> None:
    out = path.train(replace(RECIPE, epochs=1), tmp_path / "v")
    (first,) = logs_of(out).iterdir()

    header, *lines = (first / "metrics.csv").read_text().splitlines()
    assert {"epoch", "step", "loss"} <= set(header.split(","))
    assert len(lines) == 1
    assert list(first.glob("events.out.tfevents*"))
    assert left(tmp_path) == {"v", "v-logs", "v-report.html"}
