"""The runs of a comparison: every method of a family, trained and measured with several seeds.

Seed N adds 10 N to the seed of every recipe of the family, so that all methods of a seed have the same old version.
HBCT is compared with hyperbolic references. `training.comparison.schedule` carries the runs out, and
`training.comparison.table` makes a table of the results.
"""

from __future__ import annotations

import io
import signal
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from index.durable import write_whole
from index.errors import InvalidArgument
from index.evaluation.metrics import MEAN_AP, Retrieval
from index.version_folder.new_folder import check_target
from training.comparison.provenance import begun, is_made, made_of, read_note, write_note
from training.data.checks import warn_of_repeats
from training.data.images import Data
from training.fitting import checkpoint_of
from training.folder_lock import FolderInUse, card_sha
from training.measurement import compare, embed_both, measure
from training.overrides import with_overrides
from training.plan_checks import check_with_references
from training.recipe_checks import check_choices, check_numbers
from training.recipes import FAMILIES, Recipe, digits
from training.recipes.family import METHOD_PARTS, STANDALONE_PARTS, Family
from training.train import recipe_data, train, wait_for_training
from training.trained import Trained

COMPARED_FAMILIES: Mapping[str, Family] = {**FAMILIES, digits.FAMILY.name: digits.FAMILY}
"""name -> family."""
PAIRS = ("old/old", "new/old", "new/new")
METRICS = ("cmc@1", MEAN_AP)

MetricValues = dict[str, NDArray[np.float64]]
""" "<pair> <metric>" -> (Q,) values of the queries that have an item to find."""


class DataCache:
    """Images that are read, checked for repeats and decoded once for all versions that train on the same ones.

    Args:
        warn: of images that repeat.
    """

    def __init__(self, warn: bool = True) -> None:
        self._data: dict[tuple[object, ...], Data] = {}
        self._warn = warn

    def of(self, recipe: Recipe) -> Data:
        """The recipe's images."""
        fields = ("data", "root", "unreadable", "classes", "class_share", "fraction", "split_seed")
        key = tuple(getattr(recipe, field) for field in fields)
        if key not in self._data:
            self._data[key] = recipe_data(recipe)
            if self._warn:
                warn_of_repeats(self._data[key])
        return self._data[key]


@dataclass(frozen=True)
class Run:
    """One seed of a family.

    Args:
        family: its recipes.
        seed: 0 or more.
        folder: of its versions.
        settings: changes of all recipes, field=value, or of a single one, PART.field=value, as fct.epochs=80.
    """

    family: Family
    seed: int
    folder: Path
    settings: Sequence[str]

    def recipe(self, part: str) -> Recipe:
        """A recipe of the family with this run's seed and settings, whose references are this run's versions."""
        own = [setting.removeprefix(f"{part}.") for setting in self.settings if setting.startswith(f"{part}.")]
        shared = [setting for setting in self.settings if setting.partition(".")[0] not in self.family.parts()]
        recipe = with_overrides(self.family.recipe(part), [*shared, *own])
        references = {"old": recipe.old, "independent": recipe.independent}
        folders = [f"{field}={self.folder / name}" for field, name in references.items() if name]
        return with_overrides(recipe, [f"seed={recipe.seed + 10 * self.seed}", *folders])

    def check(self, part: str) -> None:
        """Refuse settings with which a part could not be trained once the parts that it needs are, and its folder.

        Raises:
            InvalidArgument: names the version and the legal values.
        """
        recipe = self.recipe(part)
        references = {field: self.recipe(reference) for field, reference in self._reference_parts(part).items()}
        try:
            check_target(self.version_folder(part))  # before a note is written into another version
            check_numbers(recipe)
            check_choices(recipe)
            check_with_references(recipe, references)
        except InvalidArgument as error:
            raise InvalidArgument(f"{recipe.name}: {error}", pointer=error.pointer) from error

    def version_folder(self, part: str) -> Path:
        """The folder of a part's version."""
        return self.folder / self.family.recipe(part).name

    def note_file(self, part: str) -> Path:
        """The file beside it that records what it was trained from, and how long."""
        return self.version_folder(part).with_suffix(".json")

    def results_file(self, part: str) -> Path:
        """The file beside it that holds its measurements."""
        return self.version_folder(part).with_suffix(".npz")

    def origin(self, part: str) -> dict[str, Any]:
        """What a version is made of now."""
        recipe = self.recipe(part)
        return made_of(recipe, [Path(folder) for folder in (recipe.old, recipe.independent) if folder])

    def is_trained(self, part: str, overwrite: bool = False) -> bool:
        """Whether a version was trained already from this recipe and these references.

        Raises:
            InvalidArgument: its folder was trained from others, and is not to be replaced; names what differs.
        """
        note = read_note(self.note_file(part)).get("made_of", {})
        return is_made(self.version_folder(part), note, self.origin(part), overwrite)

    def train(
        self, part: str, cache: DataCache, log: Callable[[str], None] = print, *, overwrite: bool = False
    ) -> None:
        """Train a version, unless it was trained already; waits for another process that trains it.

        Raises as `is_trained` and `train`.
        """
        out = self.version_folder(part)
        while True:
            wait_for_training(out, log)
            if self.is_trained(part, overwrite):
                return
            # Between the two, another process may have begun.
            with suppress(FolderInUse):
                self._train(part, cache, log)
                return

    def _train(self, part: str, cache: DataCache, log: Callable[[str], None]) -> None:
        recipe, out, origin = self.recipe(part), self.version_folder(part), self.origin(part)
        self.results_file(part).unlink(missing_ok=True)
        resumed = checkpoint_of(out).is_file()
        log(f"seed {self.seed}: {'resuming' if resumed else 'training'} {out.name}")
        write_note(self.note_file(part), {"made_of": begun(out, origin)})
        start = time.perf_counter()
        train(recipe, out, progress=False, data=cache.of(recipe))
        took = None if resumed else round(time.perf_counter() - start, 1)
        write_note(self.note_file(part), {"seconds": took, "made_of": origin})

    def is_measured(self, part: str) -> bool:
        """Whether a trained version was measured already, against the old version that is there now."""
        beside = card_sha(self.version_folder(old_part(part)))
        return self.results(part) is not None and read_note(self.note_file(part)).get("beside") == beside

    def measure(self, part: str, cache: DataCache, log: Callable[[str], None] = print) -> None:
        """Measure a version against its old one, unless it was measured already against the same one."""
        if self.is_measured(part):
            return
        note, beside = read_note(self.note_file(part)), card_sha(self.version_folder(old_part(part)))
        data = cache.of(self.recipe(part))
        new, old = (Trained.load(self.version_folder(name)) for name in (part, old_part(part)))
        report = measure(new, old, data)
        rows = dict(report.rows())
        if report.new_old is None and new.dim == old.dim:
            # No edge: show what comparing them all the same gives.
            rows["new/old"] = compare(embed_both(new, data)[0], embed_both(old, data)[1], data, old.recipe.space)
        values: dict[str, Any] = {
            name: value_Q for pair, retrieval in rows.items() for name, value_Q in per_query(pair, retrieval)
        }
        content = io.BytesIO()
        np.savez(content, **values)
        write_whole(self.results_file(part), content.getvalue())
        write_note(self.note_file(part), {**note, "beside": beside})
        summary = ", ".join(f"{pair} {100 * retrieval.mean(METRICS[0]):.1f}" for pair, retrieval in rows.items())
        took = "" if (seconds := self.seconds(part)) is None else f" after {seconds:.0f} s"
        log(f"seed {self.seed}: {self.version_folder(part).name}{took}: CMC-1 % {summary}")

    def results(self, part: str) -> MetricValues | None:
        """The measurements; None if there are none, they cannot be read, or they are against another old version.

        Also valid are those of an earlier release, whose note does not name the old version, and those whose old
        version was deleted.
        """
        beside = read_note(self.note_file(part)).get("beside")
        if beside and card_sha(self.version_folder(old_part(part))) not in {beside, ""}:
            return None
        try:
            with self.results_file(part).open("rb") as file, np.load(file) as arrays:
                return {name: arrays[name] for name in arrays.files}
        except (OSError, ValueError, EOFError, BadZipFile, zlib.error):
            return None

    def seconds(self, part: str) -> float | None:
        """How long the training took, with its measurement and export; None if it was interrupted."""
        seconds: float | None = read_note(self.note_file(part)).get("seconds")
        return seconds

    def references(self, part: str) -> list[str]:
        """The parts that this one is trained with."""
        return list(self._reference_parts(part).values())

    def needs(self, part: str) -> list[str]:
        """The parts that this one is trained or measured with."""
        return [name for name in dict.fromkeys([old_part(part), *self.references(part)]) if name != part]

    def _reference_parts(self, part: str) -> dict[str, str]:
        """Field of the recipe -> the part that it names."""
        recipe = self.family.recipe(part)
        names = {"old": recipe.old, "independent": recipe.independent}
        return {field: name.removeprefix(f"{self.family.name}_") for field, name in names.items() if name}


def runs_of(family: Family, out: Path, seeds: int, settings: Sequence[str]) -> list[Run]:
    """The runs of seeds 0 to `seeds` - 1, each in a folder below `out`.

    Raises:
        InvalidArgument: a setting of a single recipe is none of that recipe, whether it is to be trained or not.
    """
    runs = [Run(family, seed, out / f"seed{seed}", settings) for seed in range(seeds)]
    for part in family.parts():
        if any(setting.startswith(f"{part}.") for setting in settings):
            runs[0].recipe(part)
    return runs


@contextmanager
def time_limit(minutes: float | None) -> Iterator[None]:
    """Raise KeyboardInterrupt, as Ctrl-C does, after this many minutes; None: never."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 60 * (minutes or 0))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def parts_for(methods: Sequence[str] | None) -> list[str]:
    """The parts to train for some methods, by default all: first the references that they need, then the methods."""
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


def old_part(part: str) -> str:
    """The old version that a part is trained and measured against."""
    if part == "fct":
        return "side_v1"
    return "hyperbolic_v1" if part.startswith("hyperbolic") or part == "hbct" else "v1"


def independent_part(part: str) -> str:
    """The independent version that a part is measured against."""
    return "hyperbolic_independent" if old_part(part) == "hyperbolic_v1" else "independent"


def per_query(pair: str, retrieval: Retrieval) -> Iterator[tuple[str, NDArray[np.float64]]]:
    """The values of one pair by "<pair> <metric>"."""
    for metric in METRICS:
        yield f"{pair} {metric}", retrieval.per_query(metric)[retrieval.valid]
