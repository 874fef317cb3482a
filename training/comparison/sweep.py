"""A method's weights, chosen on held-out training images: the same number of trials for each method.

A tenth of each class is held out of the training images; neither queries nor items of the evaluation are looked at. The
first trial is the recipe as it is; each other one multiplies every option whose name ends in `weight` by a power of two
between 1/8 and 8. The powers follow Sobol's sequence, which covers the range evenly after few trials too; of three
independent random numbers, all may lie on one side. P_com orders the trials of a method as M(new/old) does, since the
other two numbers in it are the same for all; so the best trial is that of the highest CMC-1 new/old. The old version
may have been trained on the held-out images, which raises the level of all trials alike.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from index.errors import InvalidArgument
from index.version_folder.folder import load_version
from training.comparison.provenance import begun, is_made, made_of, read_note, write_note
from training.data.checks import warn_of_repeats
from training.data.images import Data
from training.divergence import Diverged
from training.folder_lock import FolderInUse
from training.methods import method_options
from training.plan_checks import check_plan
from training.processes import require_one
from training.recipe_checks import warn_of_slow_precision
from training.recipes import Recipe
from training.references import FIELDS, References, reference_recipes
from training.train import recipe_data, reference_folder, train, wait_for_training
from training.validation import hold_out

HELD_OUT = 0.1
LARGEST = 3
"""Weights are multiplied by 2 to the power of -LARGEST to LARGEST."""


@dataclass(frozen=True)
class Trial:
    """One setting and what came of it: CMC-1 on the held-out images.

    Args:
        recipe: what was trained.
        old_old, new_old, new_new: in [0, 1]; all 0 where the training diverged.
    """

    recipe: Recipe
    old_old: float
    new_old: float
    new_new: float

    @property
    def weights(self) -> str:
        """The weights as `--set` takes them."""
        return " ".join(f"{name}={value:g}" for name, value in self.recipe.options.items() if name.endswith("weight"))

    def as_json(self) -> dict[str, str | float]:
        """The weights and what came of them."""
        return {"weights": self.weights, **{x: getattr(self, x) for x in ("old_old", "new_old", "new_new")}}


def sweep(
    recipe: Recipe,
    trials: int,
    out: Path,
    say: Callable[[Trial], None] = lambda _: None,
    references: References | None = None,
    *,
    overwrite: bool = False,
    log: Callable[[str], None] = print,
) -> list[Trial]:
    """Train so many settings; what an earlier call trained into `out` on the same images and versions is read.

    Args:
        recipe: of a method that has an old version and weights.
        trials: how many settings, the recipe's own among them.
        out: a folder for the versions.
        say: told of each trial when it is measured.
        references: as for `training.train.train`.
        overwrite: replace trials of other settings, images or versions.
        log: told where another process trains a trial, which is waited for and then read.

    Returns:
        The trials, the best one first.

    Raises:
        InvalidArgument: the recipe has nothing to choose, or cannot be trained, there are several processes, or `out`
            holds trials of something else, which are not to be replaced.
    """
    require_one("a sweep")
    if trials < 1:
        raise InvalidArgument(f"trials must be 1 or more, not {trials}", pointer="/trials")
    if not recipe.old or not weights_of(recipe):
        raise InvalidArgument(
            f"a sweep requires a method with an old version and weights; method {recipe.method} of {recipe.name} has "
            f"{'no weight' if recipe.old else 'none'}",
            pointer="/method",
        )
    named = {**reference_recipes(recipe), **(references or {})}
    check_plan(recipe, out / "trial-0", named)
    found = (reference_folder(recipe, field, False, named) for field in FIELDS)
    folders = [folder for folder in found if folder is not None]
    data = recipe_data(recipe)
    kept, held = hold_out(data.train, HELD_OUT, recipe.split_seed)
    measured_on = Data(kept, held, held, same=True, names=data.names, stored=data.stored)
    warn_of_repeats(measured_on)
    warn_of_slow_precision(recipe)
    images = [kept.fingerprint, held.fingerprint]
    planned = [
        (setting, out / f"trial-{place}", {**made_of(setting, folders), "images": images})
        for place, setting in enumerate(settings(recipe, trials))
    ]
    for _, folder, origin in planned:
        is_made(folder, read_note(_note(folder)), origin, overwrite)
    made = []
    for setting, folder, origin in planned:
        made.append(_trial(setting, folder, origin, overwrite, measured_on, references, log))
        say(made[-1])
    return sorted(made, key=lambda trial: -trial.new_old)


def weights_of(recipe: Recipe) -> dict[str, float]:
    """The weights of a recipe's method, with the recipe's values."""
    options = {**method_options(recipe.method), **recipe.options}
    return {name: float(value) for name, value in options.items() if name.endswith("weight")}


def settings(recipe: Recipe, trials: int) -> Iterator[Recipe]:
    """The recipe itself, then others with other weights; the same each time, and more trials begin with the fewer."""
    weights = weights_of(recipe)
    yield replace(recipe, options={**recipe.options, **weights})
    # Of Sobol's points the first is a corner of the cube and the second its middle, which is the recipe itself.
    sequence: Any = torch.quasirandom.SobolEngine  # untyped in PyTorch
    points = sequence(len(weights)).fast_forward(2).draw(trials - 1, dtype=torch.float64)
    for powers in (2 * points - 1) * LARGEST:
        drawn = {
            name: float(f"{value * 2**power:.3g}")
            for (name, value), power in zip(weights.items(), powers.tolist(), strict=True)
        }
        yield replace(recipe, options={**recipe.options, **drawn})


def _trial(
    recipe: Recipe,
    out: Path,
    origin: dict[str, Any],
    overwrite: bool,
    data: Data,
    references: References | None,
    log: Callable[[str], None],
) -> Trial:
    """Train and measure one setting, unless that was done already; waits for another process that does it."""
    while True:
        wait_for_training(out, log)
        if is_made(out, read_note(_note(out)), origin, overwrite):
            break
        write_note(_note(out), begun(out, origin))
        try:
            # Between the two, another process may have begun.
            with suppress(FolderInUse):
                train(recipe, out, progress=False, data=data, references=references)
                break
        except Diverged:
            # What this trial was to replace must not stand for it.
            _note(out).unlink(missing_ok=True)
            shutil.rmtree(out, ignore_errors=True)
            return Trial(recipe, 0.0, 0.0, 0.0)
    write_note(_note(out), origin)  # also for a training that ended but could not write it
    metrics = load_version(out).card.metrics
    return Trial(recipe, *(float(metrics[pair]["cmc@1"]["value"]) for pair in ("old/old", "new/old", "new/new")))


def _note(out: Path) -> Path:
    return out.with_name(f"{out.name}.json")
