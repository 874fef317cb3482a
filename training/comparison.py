"""Every method of a family over several seeds: trained one after the other, measured, kept, and gone on with.

`compare_methods` trains what OUT/seed<N>/ does not hold yet and measures it; stopped, it goes on. One seed of
all methods comes before a second of any. Seed N adds 10 N to the seed of every recipe of the family, so that every
method of a seed has the same old version. HBCT stands beside hyperbolic references. What is measured becomes a table in
`training.comparison_table`.
"""

from __future__ import annotations

import io
import signal
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from index.evaluation.metrics import MEAN_AP, Retrieval
from index.version import CARD
from training.data import Data
from training.divergence import Diverged
from training.evaluate import compare, embed_both, measure
from training.fitting import checkpoint_of
from training.folder_lock import wait_until_unlocked
from training.overrides import with_overrides
from training.processes import require_one
from training.provenance import card_sha, made_of, read_note, write_note, write_whole
from training.recipes import FAMILIES, Recipe, digits
from training.recipes.family import METHOD_PARTS, STANDALONE_PARTS, Family
from training.train import recipe_data, train
from training.trained import Trained

COMPARED: Mapping[str, Family] = {**FAMILIES, digits.FAMILY.name: digits.FAMILY}
"""name -> family."""
PAIRS = ("old/old", "new/old", "new/new")
METRICS = ("cmc@1", MEAN_AP)

MetricValues = dict[str, NDArray[np.float64]]
""" "<pair> <metric>" -> (Q,) values of the queries that have an item to find."""
Part = tuple[int, str]
"""A seed, and what follows the family's name in the name of a recipe."""


@dataclass(frozen=True)
class Sets:
    """Images read and decoded once for all versions that train on the same ones.

    Args:
        read: what decides a recipe's images -> the images.
    """

    read: dict[tuple[object, ...], Data]

    def of(self, recipe: Recipe) -> Data:
        """The recipe's images."""
        fields = ("data", "root", "unreadable", "classes", "class_share", "fraction", "split_seed")
        key = tuple(getattr(recipe, field) for field in fields)
        if key not in self.read:
            self.read[key] = recipe_data(recipe)
        return self.read[key]


@dataclass(frozen=True)
class Run:
    """One seed of a family.

    Args:
        family: which.
        seed: which.
        folder: where its versions are.
        settings: changes of every recipe, field=value; of a single one, PART.field=value, as fct.epochs=80.
    """

    family: Family
    seed: int
    folder: Path
    settings: Sequence[str]

    def recipe(self, part: str) -> Recipe:
        """A recipe of the family with this run's seed, its references being this run's versions."""
        own = [setting.removeprefix(f"{part}.") for setting in self.settings if setting.startswith(f"{part}.")]
        for_all = [setting for setting in self.settings if setting.partition(".")[0] not in self.family.parts()]
        recipe = with_overrides(self.family.recipe(part), [*for_all, *own])
        references = {"old": recipe.old, "independent": recipe.independent}
        here = [f"{field}={self.folder / name}" for field, name in references.items() if name]
        return with_overrides(recipe, [f"seed={recipe.seed + 10 * self.seed}", *here])

    def version(self, part: str) -> Path:
        """Folder of a version."""
        return self.folder / self.family.recipe(part).name

    def note(self, part: str) -> Path:
        """The file that says how a version was trained."""
        return self.version(part).with_suffix(".json")

    def measured(self, part: str) -> Path:
        """The file of a version's measurements."""
        return self.version(part).with_suffix(".npz")

    def train(self, part: str, sets: Sets, say: Callable[[str], None] = print) -> None:
        """Train a version unless the one that is there came of this recipe and these references."""
        recipe, out = self.recipe(part), self.version(part)
        wait_until_unlocked(out, say)
        origin = made_of(recipe, [Path(folder) for folder in (recipe.old, recipe.independent) if folder])
        if (out / CARD).is_file() and read_note(self.note(part)).get("made_of") == origin:
            return
        self.measured(part).unlink(missing_ok=True)
        resumed = checkpoint_of(out).is_file()
        say(f"seed {self.seed}: {'going on with' if resumed else 'training'} {out.name}")
        start = time.perf_counter()
        train(recipe, out, progress=False, data=sets.of(recipe))
        took = None if resumed else round(time.perf_counter() - start, 1)
        write_note(self.note(part), {"seconds": took, "made_of": origin})

    def measure(self, part: str, sets: Sets, say: Callable[[str], None] = print) -> None:
        """Measure a version beside its old one, unless that was done with the old one that is there."""
        note, beside = read_note(self.note(part)), card_sha(self.version(old_of(part)))
        if self.results(part) is not None and note.get("beside") == beside:
            return
        data = sets.of(self.recipe(part))
        new, old = (Trained.load(self.version(name)) for name in (part, old_of(part)))
        report = measure(new, old, data)
        rows = dict(report.rows())
        if report.new_old is None and new.dim == old.dim:
            # No edge: what comes of comparing all the same.
            rows["new/old"] = compare(embed_both(new, data)[0], embed_both(old, data)[1], data, old.recipe.space)
        values: dict[str, Any] = {name: x for pair, found in rows.items() for name, x in per_query(pair, found)}
        held = io.BytesIO()
        np.savez(held, **values)
        write_whole(self.measured(part), held.getvalue())
        write_note(self.note(part), {**note, "beside": beside})
        found = ", ".join(f"{pair} {100 * measured.mean(METRICS[0]):.1f}" for pair, measured in rows.items())
        took = "" if (seconds := self.seconds(part)) is None else f" after {seconds:.0f} s"
        say(f"seed {self.seed}: {self.version(part).name}{took}: CMC-1 % {found}")

    def results(self, part: str) -> MetricValues | None:
        """What was measured; None before it is, where it cannot be read, or beside an old version that is no more.

        A note that does not say beside which is of an earlier release, and one whose version is gone is believed.
        """
        beside = read_note(self.note(part)).get("beside")
        if beside and card_sha(self.version(old_of(part))) not in {beside, ""}:
            return None
        try:
            with self.measured(part).open("rb") as file, np.load(file) as held:
                return {name: held[name] for name in held.files}
        except (OSError, ValueError, EOFError, BadZipFile, zlib.error):
            return None

    def seconds(self, part: str) -> float | None:
        """How long the training took, with its measurement and export; None: it was interrupted, so nobody knows."""
        seconds: float | None = read_note(self.note(part)).get("seconds")
        return seconds

    def needs(self, part: str) -> list[str]:
        """The parts that this one is trained or measured with."""
        recipe = self.family.recipe(part)
        named = [name.removeprefix(f"{self.family.name}_") for name in (recipe.old, recipe.independent) if name]
        return [name for name in dict.fromkeys([old_of(part), *named]) if name != part]


def runs_of(family: Family, out: Path, seeds: int, settings: Sequence[str]) -> list[Run]:
    """The runs of so many seeds, in a folder each."""
    return [Run(family, seed, out / f"seed{seed}", settings) for seed in range(seeds)]


def compare_methods(
    runs: Sequence[Run],
    parts: Sequence[str],
    after_each: Callable[[], None],
    say: Callable[[str], None] = print,
) -> None:
    """Train and measure what is missing, one seed of all parts before the next seed.

    Args:
        runs: one for each seed.
        parts: what follows the family's name in the names of its recipes, references first.
        after_each: called when another part has been measured.
        say: told of each training and what came of it.

    Raises:
        InvalidArgument: there are several processes.
    """
    require_one("a comparison of methods")
    sets = Sets({})
    failed: set[Part] = set()
    for run in runs:
        for part in parts:
            if why := _why_untrained(run, part, failed, sets, say):
                failed.add((run.seed, part))
                # It would be of versions that other settings gave.
                run.measured(part).unlink(missing_ok=True)
                say(f"seed {run.seed}: {run.version(part).name} has no row: {why}")
                continue
            run.measure(part, sets, say)
            after_each()


def _why_untrained(run: Run, part: str, failed: Collection[Part], sets: Sets, say: Callable[[str], None]) -> str:
    """Train a part; why it could not be trained, or nothing."""
    if lost := [name for name in run.needs(part) if (run.seed, name) in failed]:
        return f"{', '.join(lost)}, which it needs, could not be trained"
    try:
        run.train(part, sets, say)
    except Diverged as error:
        return str(error)
    return ""


@contextmanager
def at_most(minutes: float | None) -> Iterator[None]:
    """Leave with KeyboardInterrupt when so many minutes are over, as if Ctrl-C had been pressed; None: never."""

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    heard = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, 60 * (minutes or 0))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, heard)


def parts_of(methods: Sequence[str] | None) -> list[str]:
    """The references that some methods need, then these methods; None: all."""
    chosen = list(methods or METHOD_PARTS)
    hyperbolic, euclidean = "hbct" in chosen, set(chosen) - {"hbct"}
    needed = {
        "v1": euclidean,
        "side_v1": "fct" in chosen,
        "independent": euclidean,
        "hyperbolic_v1": hyperbolic,
        "hyperbolic_independent": hyperbolic,
    }
    return [*(part for part in STANDALONE_PARTS if needed[part]), *chosen]


def old_of(part: str) -> str:
    """The first version that a part stands beside."""
    if part == "fct":
        return "side_v1"
    return "hyperbolic_v1" if part.startswith("hyperbolic") or part == "hbct" else "v1"


def independent_of(part: str) -> str:
    """The independent version that a part is measured against."""
    return "hyperbolic_independent" if old_of(part) == "hyperbolic_v1" else "independent"


def per_query(pair: str, measured: Retrieval) -> Iterator[tuple[str, NDArray[np.float64]]]:
    """The values of one pair by "<pair> <metric>"."""
    for metric in METRICS:
        yield f"{pair} {metric}", measured.per_query(metric)[measured.valid]
