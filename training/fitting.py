"""Lightning's loop around `training.module`: devices, precision, logs, checkpoints and Ctrl-C.

A training that was stopped, by whatever means, resumes from its last finished epoch when started again, and ends in the
same weights: batches follow from seed and epoch (`batching`), and every step seeds its own random numbers.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import math
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from index.durable import whole_file
from index.errors import InvalidArgument, Unwritable, raise_if_out_of_memory
from index.version_folder.folder import sha256
from training import processes
from training.data.batching import TrainingBatch, training_batches
from training.data.images import Data, ImageSet
from training.divergence import Diverged
from training.measurement import run_over
from training.module import BaseTraining
from training.trained import WEIGHTS
from training.validation import Validation

CHECK_EVERY = 50
"""Steps between checks and logs of the loss; on a GPU each check waits for the step."""

_log = logging.getLogger(__name__)


def fit(module: BaseTraining, data: Data, validation: Validation | None = None, *, out: Path, progress: bool) -> None:
    """Train over the training images, on a GPU where there is one, deterministically.

    It resumes from a checkpoint of the same training at `checkpoint_of(out)`.

    Args:
        module: what to train; in eval mode and on the CPU afterwards.
        data: its `train` images are trained on.
        out: the version folder that will be written; checkpoint and logs lie beside it.
        progress: show a bar, and write TensorBoard and CSV logs into `logs_of(out)`.
        validation: measures after every epoch; the module ends with the weights of its best one.

    Raises:
        KeyboardInterrupt: stopped by Ctrl-C or SIGTERM.
        InvalidArgument: the checkpoint is damaged, or the processes cannot share a batch equally.
        Diverged: the loss became infinite or NaN; the checkpoint is of an epoch before that.
        Unwritable: the disk is full.
    """
    recipe, images = module.recipe, data.train.dense()
    checkpoints = CheckpointWriter(checkpoint_of(out), lambda: identity(module, data, validation))
    done = checkpoints.epochs_done()
    if done and progress and processes.is_rank_zero():
        print(f"resuming after epoch {done} of {recipe.epochs} from {checkpoints.path}")
    rank, world = processes.rank(), processes.world()
    cached = embeddings(module, images)
    if images.stored is not None:
        cached["old"] = torch.from_numpy(images.stored)
    skip_images = not module.needs_images(cached)
    loader = training_batches(images, recipe, cached, rank, world, done, module.views, skip_images=skip_images)
    with quiet_lightning(), interruptible():
        trainer = lightning.Trainer(
            max_epochs=recipe.epochs,
            precision=recipe.precision,  # type: ignore[arg-type]  # see `training.recipe_checks.check_choices`
            devices=processes.local_world(),
            num_nodes=world // processes.local_world(),
            strategy="ddp" if world > 1 else "auto",
            use_distributed_sampler=False,
            deterministic=True,
            callbacks=[
                DivergenceCheck(),
                *([] if validation is None else [validation]),
                checkpoints,
                *([EpochsFromOne()] if progress else []),
            ],
            logger=loggers(logs_of(out)) if progress else False,
            log_every_n_steps=min(CHECK_EVERY, len(loader)),
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=progress,
        )
        try:
            trainer.fit(module, loader, ckpt_path=checkpoints.path if done else None, weights_only=True)
        except OSError as error:  # the loggers' own; a checkpoint says what it is
            if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
                raise
            raise Unwritable(f"logs could not be written to {logs_of(out)}: {error.strerror}") from error
    module.eval().cpu()
    if validation is not None:
        validation.restore(module)
        if progress and processes.is_rank_zero():
            print(validation.told())


def checkpoint_of(out: Path) -> Path:
    """The file that a training writes after each epoch; removed once its version is written."""
    return out.with_name(f"{out.name}.checkpoint")


def logs_of(out: Path) -> Path:
    """The folder of a version's logs: `version_0`, and one more for each time that the training resumed."""
    return out.with_name(f"{out.name}-logs")


class EpochsFromOne(RichProgressBar):
    """Lightning's bar, which counts epochs from 0, unlike errors and `resuming after epoch 1 of 3`."""

    def _get_train_description(self, current_epoch: int) -> str:
        return f"Epoch {current_epoch + 1}/{self.trainer.max_epochs}"


class DivergenceCheck(lightning.Callback):
    """Ends a training that diverged."""

    last: TrainingBatch
    """The last batch of an epoch."""

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % CHECK_EVERY and not trainer.is_last_batch:
            return
        loss = _mean_over_processes(trainer, outputs["loss"])
        if not math.isfinite(loss):
            raise Diverged(f"the loss is {loss} in epoch {trainer.current_epoch + 1}, step {batch_idx + 1}")
        self.last = batch

    @torch.no_grad()
    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        # The weights after the last step have had no loss computed yet.
        assert isinstance(pl_module, BaseTraining)
        was = pl_module.training
        loss = _mean_over_processes(trainer, pl_module.eval().step(self.last).loss)
        pl_module.train(was)
        if not math.isfinite(loss):
            raise Diverged(f"the loss is {loss} after epoch {trainer.current_epoch + 1}")


def _mean_over_processes(trainer: lightning.Trainer, loss: Tensor) -> float:
    """The mean over all processes: one that ended alone would leave the others waiting for it."""
    return float(trainer.strategy.reduce(loss.detach().clone(), reduce_op="mean"))


class CheckpointWriter(lightning.Callback):
    """Writes a checkpoint after every epoch, whole or not at all.

    Args:
        path: the file; each epoch replaces the last one's.
        identify: returns the training's `identity` as JSON; only checkpoints with the same one are resumed. It reads
            every image, so it is called only once there is a checkpoint to compare or to write.
    """

    def __init__(self, path: Path, identify: Callable[[], dict[str, Any]]) -> None:
        self.path, self.identify = path, identify
        self.training: dict[str, Any] = {}

    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self.training = self.training or self.identify()
        # All processes must take part; only the first one writes.
        with whole_file(self.path) if trainer.is_global_zero else nullcontext(self.path) as part:
            trainer.save_checkpoint(part)

    def on_save_checkpoint(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint["training"] = self.training
        checkpoint["epochs_done"] = trainer.current_epoch + 1

    def epochs_done(self) -> int:
        """Number of epochs in the checkpoint; 0 where there is none, or one of another training, which is logged.

        Raises:
            InvalidArgument: it is damaged.
        """
        if not self.path.is_file():
            return 0
        try:
            kept = torch.load(self.path, map_location="cpu", weights_only=True, mmap=True)
            training, done = kept["training"], int(kept["epochs_done"])
        except Exception as error:  # unpickling raises whatever the broken bytes lead it to
            raise_if_out_of_memory(error)
            raise InvalidArgument(
                f"{self.path} is damaged, so the training cannot resume; remove it to start over", pointer="/out"
            ) from error
        self.training = self.identify()
        if other := changes(self.training, training):
            if processes.is_rank_zero():
                _log.warning(
                    "%s is of another training, which differs in %s; the training starts over", self.path, other
                )
            return 0
        return done


def identity(module: BaseTraining, data: Data, validation: Validation | None) -> dict[str, Any]:
    """Everything that decides a training's result, by name: tells it from others that would write the same folder.

    The number of data loader workers is left out, as batches do not depend on it, see `training.data.batching`.
    """
    seen = hashlib.sha256()
    for model in module.frozen_models.values():
        for weights in model.state_dict().values():
            seen.update(weights.cpu().numpy().tobytes())
    recipe = {name: value for name, value in module.recipe.as_json().items() if name != "workers"}
    return {
        **recipe,
        "class names": data.classes,
        "images": data.train.fingerprint,
        # They choose the epoch.
        **({} if validation is None else {"held-out images": validation.data.query.fingerprint}),
        "reference models": seen.hexdigest(),
        "file of weights": _sha256(Path(module.recipe.weights)) if module.recipe.weights else "",
    }


def changes(training: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The names under which two identities differ, as text; not `root`, as the images themselves are compared."""
    names = dict.fromkeys(name for name in (*training, *other) if name != "root")
    return ", ".join(name for name in names if training.get(name) != other.get(name))


def _sha256(weights: Path) -> str:
    """The sha256 of a weights file, or of that in a version folder; "" where there is none, as none is loaded then."""
    path = weights / WEIGHTS if weights.is_dir() else weights
    return sha256(path) if path.is_file() else ""


def embeddings(module: BaseTraining, images: ImageSet) -> dict[str, Tensor]:
    """Outputs of frozen models for all training images, preprocessed as in evaluation, by model name.

    Of all models with `cache_old`; else of those whose preprocessing differs from the batches'.
    """
    own = module.recipe.preprocess
    seen = {name: (model, model.preprocess or own) for name, model in module.frozen_models.items()}
    made_now = {name for name, (_, spec) in seen.items() if module.recipe.cache_old or spec != own}
    return {name: run_over(images, *seen[name]) for name in seen if name in made_now}


def loggers(folder: Path) -> list[Logger]:
    """A CSV and a TensorBoard logger, in one new folder for each start."""
    csv = CSVLogger(folder, name="")
    return [csv, TensorBoardLogger(folder, name="", version=csv.version)]


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn Ctrl-C and SIGTERM into KeyboardInterrupt.

    Lightning exits on both, successfully on SIGTERM, and ignores Ctrl-C from then on.
    """
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit as error:
        if isinstance(error, SIGTERMException) or isinstance(error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        raise
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, handler)


@contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """Use so many CPU threads inside the block; 0 changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Silence Lightning's warnings about loggers, workers and devices, which recipes decide."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"lightning\..*")
            yield
    finally:
        logger.setLevel(level)
