"""`--kind auto` against every single kind of fitted edge on hidden pairs: does it ever lose by more than chance?

    python benchmarks/edge_kinds.py rotation digits cifar100 --data FOLDER --pairs 2500 --seeds 3

A fifth of the pairs is hidden: used neither to fit nor to choose. Every kind is fitted on the rest and must find the
hidden ones among all old embeddings; `auto` is the kind that `choose_kind` chooses on the rest. `labels`: a match is
right if it shares the class, and slerp takes part, which needs labels and uses both encoders. `own`: each query must
find itself.

Known relations between two versions, of 250 clusters in 128 numbers, with noise on both sides:

    rotation   of the new space
    affine     to 96 numbers, of condition 30, with an offset
    low rank   the old space knows 24 directions of the new one
    bent       a layer of 192 tanh, to 96 numbers

Images: `digits`, the encoders examples/v1 and examples/v2-fct (trained independently); with --data `cifar100`, the
encoders examples/photos-v1 and photos-v2, and `omniglot`, discriminant projections of gradient histograms, the old one
of half of the classes and a third of the features. Printed: CMC@1 in percent over the queries of all seeds, the choice
of `auto`, and its score minus that of the best single kind, which is known only afterwards, with the 95 % interval
paired over queries.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import typer
from command_line import Count, choice_of, run_main
from default_modes import describe as histograms
from default_modes import discriminant, read, unit
from numpy.typing import NDArray
from PIL import Image

from index.encoders.encoder import Encoder
from index.evaluation.adapter_choice import METRIC, choose_kind
from index.evaluation.fitting import measure, split_pairs
from index.evaluation.metrics import Bools, Floats, paired_bootstrap
from index.version import ENCODER, Card
from index.version_folder.folder import load_version
from training.adapters.fit_edge import ADAPTER_OF, fits_of

CLUSTERS, WIDE, NARROW, RANK = 250, 128, 96, 24
IMAGES = {"digits": ("examples/v1", "examples/v2-fct"), "cifar100": ("examples/photos-v1", "examples/photos-v2")}
BLOCK = 256
Array = NDArray[np.float64]


class Embedded(NamedTuple):
    """What both versions say of the same inputs, (S, M) and (S, N), and their classes (S,)."""

    new: Array
    old: Array
    labels: NDArray[np.int64]


def main(
    sets: Annotated[list[str] | None, typer.Argument(parser=choice_of(SETS))] = None,
    data: Annotated[Path | None, typer.Option(exists=True, help="Folder of cifar100 and omniglot.")] = None,
    pairs: Count = 2_500,
    seeds: Count = 3,
) -> None:
    if data is None and {"cifar100", "omniglot"} & set(sets or ()):
        raise typer.BadParameter("cifar100 and omniglot need it", param_hint="--data")
    print(f"| set | right | {' | '.join(ADAPTER_OF)} | auto | chosen | auto - best single | loses |")
    print(f"| {' | '.join(['---'] * (len(ADAPTER_OF) + 6))} |")
    for name in sets or [*RELATIONS, "digits", *(["cifar100", "omniglot"] if data else [])]:
        draw = drawing(name, data, pairs)
        for right in ("labels", "own"):
            print(
                row(name, right, [hidden(draw(seed), right == "labels", seed) for seed in range(seeds)]),
                flush=True,
            )


def hidden(given: Embedded, labelled: bool, seed: int) -> tuple[str, dict[str, tuple[Floats, Bools]]]:
    """The kind that is chosen, and of each kind the metric of the hidden queries and which of them count."""
    new, old = (np.ascontiguousarray(unit(x), np.float32) for x in (given.new, given.old))
    new_card, old_card = (
        Card(name, x.shape[1], {"kind": "cosine"}, files={ENCODER: "x"}) for name, x in (("new", new), ("old", old))
    )
    fit = fits_of(new_card, old_card, {})
    pairs = split_pairs(new, old, given.labels if labelled else None, seed)
    choice = choose_kind(ADAPTER_OF, fit, pairs, old_card, seed)
    reached = {kind: measure(fit(kind, pairs)(pairs.new_QM, pairs.old_QN), pairs, old_card) for kind in choice.reached}
    return choice.kind, {kind: (found.per_query(METRIC), found.valid) for kind, found in reached.items()}


def row(name: str, right: str, runs: list[tuple[str, dict[str, tuple[Floats, Bools]]]]) -> str:
    every: dict[str, list[Floats]] = defaultdict(list)
    for chosen, reached in runs:
        for kind, (values, valid) in reached.items():
            every[kind].append(values[valid])
        every["auto"].append(every[chosen][-1])
    pooled = {kind: np.concatenate(parts) for kind, parts in every.items()}
    best = max((kind for kind in pooled if kind != "auto"), key=lambda kind: pooled[kind].mean())
    gain = paired_bootstrap(pooled["auto"], pooled[best])
    shown = [f"{100 * pooled[kind].mean():.1f}" if kind in pooled else "" for kind in (*ADAPTER_OF, "auto")]
    picked = ", ".join(f"{kind} {count}" for kind, count in Counter(chosen for chosen, _ in runs).most_common())
    told = f"{100 * gain.value:+.1f} [{100 * gain.low:+.1f}, {100 * gain.high:+.1f}] ({best})"
    return f"| {name} | {right} | {' | '.join(shown)} | {picked} | {told} | {'yes' if gain.high < 0 else 'no'} |"


def drawing(name: str, data: Path | None, count: int) -> Callable[[int], Embedded]:
    """A set's pairs by seed."""
    if name in RELATIONS:
        return lambda seed: related(name, count, np.random.default_rng(seed))
    whole = embedded(name, data)

    def draw(seed: int) -> Embedded:
        rows = np.random.default_rng(seed).permutation(len(whole.labels))[:count]
        return Embedded(whole.new[rows], whole.old[rows], whole.labels[rows])

    return draw


def related(name: str, count: int, generator: np.random.Generator) -> Embedded:
    """Clusters in the new space, and what the relation makes of them in the old one."""
    labels = generator.integers(CLUSTERS, size=count)
    centres = generator.normal(size=(CLUSTERS, WIDE))
    new = unit(centres[labels] + 1.2 * generator.normal(size=(count, WIDE)))
    old = unit(RELATIONS[name](new, generator))
    noise = 0.5 * generator.normal(size=old.shape) / np.sqrt(old.shape[1])
    return Embedded(new, unit(old + noise), labels)


def rotated(x: Array, generator: np.random.Generator) -> Array:
    return np.asarray(x @ np.linalg.qr(generator.normal(size=(WIDE, WIDE)))[0])


def affine(x: Array, generator: np.random.Generator) -> Array:
    left, right = (np.linalg.qr(generator.normal(size=(size, size)))[0] for size in (WIDE, NARROW))
    stretched = x @ (left[:, :NARROW] * np.geomspace(1, 1 / 30, NARROW)) @ right
    return np.asarray(stretched + 0.3 * generator.normal(size=NARROW) / 7)


def low_rank(x: Array, generator: np.random.Generator) -> Array:
    return np.asarray(x @ generator.normal(size=(WIDE, RANK)) @ generator.normal(size=(RANK, NARROW)))


def bent(x: Array, generator: np.random.Generator) -> Array:
    inner = np.tanh(1.5 * x @ generator.normal(size=(WIDE, 192)) + generator.normal(size=192))
    return np.asarray(inner @ generator.normal(size=(192, NARROW)))


RELATIONS = {"rotation": rotated, "affine": affine, "low rank": low_rank, "bent": bent}
SETS = (*RELATIONS, *IMAGES, "omniglot")


def embedded(name: str, data: Path | None) -> Embedded:
    """Real images by both versions."""
    images, labels = read(name, data)
    if name == "omniglot":
        return projected(images, labels)
    old, new = (
        np.concatenate([encode(folder, images[at : at + BLOCK]) for at in range(0, len(images), BLOCK)])
        for folder in IMAGES[name]
    )
    return Embedded(new, old, labels)


def encode(folder: str, images: list[Image.Image]) -> Array:
    return Encoder(load_version(Path(folder))).encode(images).vectors.astype(np.float64)


def projected(images: list[Image.Image], labels: NDArray[np.int64]) -> Embedded:
    """Two discriminant projections; the pairs are of classes that neither was fitted on."""
    features, classes = histograms(images, 48), np.random.default_rng(0).permutation(np.unique(labels))
    seen, kept = classes[: len(classes) // 2], classes[len(classes) // 2 :]
    train, half = np.isin(labels, seen), np.isin(labels, seen[: len(seen) // 2])
    narrow = features[:, : features.shape[1] // 3]
    old = narrow @ discriminant(narrow[half], labels[half], 32)
    new = features @ discriminant(features[train], labels[train], 48)
    rows = np.isin(labels, kept)
    return Embedded(unit(new[rows]), unit(old[rows]), labels[rows])


if __name__ == "__main__":
    run_main(main)
