"""Does any merge mode beat the default? Many small upgrades of real images, over seeds, shares and kinds of edges.

    python benchmarks/default_modes.py omniglot cifar100 tiny_imagenet --data FOLDER --seeds 5
    python benchmarks/default_modes.py digits --seeds 5
    python benchmarks/default_modes.py photos --data photo-sets --seeds 5

Versions are cheap stand-ins, which allows many of them: gradient histograms and colours of real images, reduced by
principal components, then a linear discriminant projection fitted on training classes (old: half of the classes, a
third of the features; new: all). The edges:

    identity   new is a ridge regression of the new features on the old embeddings and the old class means (after BCT)
    truncate   the same, beside further dimensions (after BT2 and OCA); `zero_pad` without renormalising
    procrustes an independent new version, and a rotation fitted on training images; `dual` none, queries by the old
    forward    old items carried to the new space by ridge regression; unmoved ones by `dual`

`photos` are real networks instead: examples/photos-v1 and photos-v2 (OCA, so `truncate`), and a rotation from the new
to the old one fitted on classes that both know; each seed draws 20 of the 25 classes that no training saw.

The classes of the gallery are hidden: no projection has seen them. One half of the queries chooses the mode as a gate
does (`modes.choose_merge_mode`) and fits the maps; the other half measures every mode. Printed: the area under the
curve (0, 10, ... 100 % moved in random order) of the default; the gain of each other mode over it, with its interval
over the query images; each with the mean of its seeds; and how often each mode was chosen. `held`: no other mode beats
the default beyond the interval. If one does, `corrected` says whether this holds for the intervals of all rows
together.
"""

from __future__ import annotations

import io
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from command_line import Count, choice_of, run_main
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits

from index.encoders.encoder import Encoder
from index.evaluation.curves import CALIBRATED, RANK, RAW, curve_values
from index.evaluation.metrics import MEAN_AP, Compared, paired_bootstrap
from index.evaluation.modes import choose_merge_mode
from index.evaluation.relevance import LabelRelevance
from index.query.edge_maps import default_mode
from index.space import Cosine
from index.version_folder.folder import load_version

Floats = NDArray[np.float64]
Areas = dict[str, NDArray[Any]]
"""Mode -> the area under the curve of each query; `image`: the number of its image."""

STAND_INS = ("omniglot", "cifar100", "tiny_imagenet", "digits")
SIZE = {"omniglot": 48, "cifar100": 32, "tiny_imagenet": 48, "digits": 16}
CLASSES = {"omniglot": 100, "cifar100": 20, "tiny_imagenet": 30, "digits": 5}
"""Hidden classes of a gallery."""
PER_CLASS, QUERIES, ITEMS, OLD_DIM, NEW_DIM = 60, 600, 1_500, 16, 48
MODES = (RAW, RANK, CALIBRATED)
CORRECTED = 1 - 0.05 / 72
"""The level at which 72 comparisons, two in each of 36 rows, hold together with 95 % (Bonferroni)."""
COSINE = Cosine()
PHOTOS = (Path("examples/photos-v1"), Path("examples/photos-v2"))


@dataclass(frozen=True)
class Upgrade:
    """One way to upgrade: what queries meet before items move, and after; the kind of its edge; the images that ask."""

    kind: str
    before: Compared
    after: Compared
    images: NDArray[np.int64]


Draw = Callable[[int], Iterator[tuple[Upgrade, LabelRelevance]]]
"""A seed -> upgrades, and the relevant items of each."""


def main(
    sets: Annotated[list[str], typer.Argument(parser=choice_of((*STAND_INS, "photos")))],
    data: Annotated[Path | None, typer.Option(exists=True, help="Folder of the sets.")] = None,
    seeds: Count = 5,
    few: Annotated[int, typer.Option(min=2, help="Queries that choose the mode, at most.")] = QUERIES,
) -> None:
    if data is None and set(sets) != {"digits"}:
        raise typer.BadParameter("every set but digits needs it", param_hint="--data")
    print("| set | edge | metric | default | chosen | area | raw | rank | calibrated | held |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in sets:
        draw = photos(data) if name == "photos" and data else stand_ins(name, data)
        found: dict[tuple[str, str], list[Areas]] = defaultdict(list)
        chosen: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        for seed in range(seeds):
            for metric in ("cmc@1", MEAN_AP):
                for upgrade, relevance in draw(seed):
                    mode, area = measured(upgrade, relevance, metric, few, seed)
                    found[upgrade.kind, metric].append({"default": area[mode], **area})
                    chosen[upgrade.kind, metric][mode] += 1
        for (kind, metric), areas in found.items():
            print(row(name, kind, metric, areas, chosen[kind, metric]), flush=True)


def stand_ins(name: str, root: Path | None) -> Draw:
    """Linear versions of one set."""
    images, labels = read(name, root)
    features = describe(images, SIZE[name])
    return lambda seed: upgrades(features, labels, CLASSES[name], seed)


def photos(root: Path) -> Draw:
    """The encoders that come with the service, on test images of classes that neither knows."""
    old, new = (load_version(folder) for folder in PHOTOS)
    known = set(new.card.data["classes"])
    both = sorted(known & set(old.card.data["classes"]))
    folders = sorted(folder for folder in (root / "test").glob("*/*") if folder.is_dir())
    hidden = [folder for folder in folders if folder.relative_to(root / "test").as_posix() not in known]
    files = [(file, label) for label, folder in enumerate(hidden) for file in sorted(folder.iterdir())]
    labels = np.array([label for _, label in files])
    seen = [file for name in both[::2] for file in sorted((root / "test" / name).iterdir())[:30]]
    embedded = [[embed(Encoder(one), paths) for paths in ([f for f, _ in files], seen)] for one in (old, new)]
    (old_x, old_seen), (new_x, new_seen) = embedded
    cut = unit(new_x[:, : old_x.shape[1]])
    turned = unit(new_x @ rotation(new_seen, old_seen))

    def draw(seed: int) -> Iterator[tuple[Upgrade, LabelRelevance]]:
        generator = np.random.default_rng(seed)
        classes = generator.permutation(len(hidden))[:20]
        among = generator.permutation(np.flatnonzero(np.isin(labels, classes)))
        query, item = among[: len(among) // 3], among[len(among) // 3 :]
        relevance = LabelRelevance(labels[query], labels[item], np.full(len(query), -1))
        for kind, moved in (("truncate", cut), ("matrix", turned), ("dual", old_x)):
            before = Compared(moved[query].astype(np.float32), old_x[item].astype(np.float32), COSINE)
            after = Compared(new_x[query].astype(np.float32), new_x[item].astype(np.float32), COSINE)
            yield Upgrade(kind, before, after, query), relevance

    return draw


def embed(encoder: Encoder, files: list[Path], block: int = 256) -> Floats:
    """(N, D) embeddings of image files."""
    starts = range(0, len(files), block)
    made = [encoder.encode([Image.open(file) for file in files[start : start + block]]).vectors for start in starts]
    return np.concatenate(made).astype(np.float64)


def row(name: str, kind: str, metric: str, areas: list[Areas], chosen: Counter[str]) -> str:
    image = np.concatenate([one["image"] for one in areas])
    every = {mode: by_image(np.concatenate([one[mode] for one in areas]), image) for mode in ("default", *MODES)}
    gains = {mode: paired_bootstrap(every[mode], every["default"]) for mode in MODES}
    wide = [paired_bootstrap(every[mode], every["default"], n=20_000, level=CORRECTED) for mode in MODES]
    told = [f"{100 * g.value:+.1f} [{100 * g.low:+.1f}, {100 * g.high:+.1f}]" for g in gains.values()]
    held = "yes" if all(gain.low <= 0 for gain in gains.values()) else "no"
    held += "" if held == "yes" else ", corrected: " + ("yes" if all(gain.low <= 0 for gain in wide) else "no")
    default = default_mode([kind]).value
    picked = ", ".join(f"{mode} {count}" for mode, count in chosen.most_common())
    area = f"{100 * every['default'].mean():.1f}"
    return f"| {name} | {kind} | {metric} | {default} | {picked} | {area} | {' | '.join(told)} | {held} |"


def by_image(values: Floats, image: NDArray[np.int64]) -> Floats:
    """The mean of each image that is a query: several seeds may draw it, and it says something new only once."""
    return np.bincount(image, values)[np.unique(image)] / np.unique(image, return_counts=True)[1]


def measured(upgrade: Upgrade, relevance: LabelRelevance, metric: str, few: int, seed: int) -> tuple[str, Areas]:
    """The mode that one half of the queries chooses, and each mode's area for the queries of the other half."""
    half = np.random.default_rng(seed).permutation(len(relevance.query_codes)) % 2
    choosing, judging = np.flatnonzero(half == 0)[:few], np.flatnonzero(half == 1)
    own = LabelRelevance(relevance.query_codes[choosing], relevance.item_codes, relevance.self_Q[choosing])
    before, after = (Compared(side.queries[choosing], side.items, COSINE) for side in (upgrade.before, upgrade.after))
    chosen = choose_merge_mode(before, after, own, default=default_mode([upgrade.kind]), metric=metric, seed=seed)
    order = {"": np.random.default_rng(seed + 1).permutation(len(upgrade.before.items))}
    values = curve_values(
        upgrade.before, upgrade.after, relevance, order, MODES, metric=metric, points=11, fit_on=choosing
    )
    asked = np.isin(np.flatnonzero(relevance.valid), judging)
    asked_Q = np.flatnonzero(relevance.valid)[asked]
    area: Areas = {mode: np.asarray(np.trapezoid(curve, dx=0.1, axis=0))[asked] for (_, mode), curve in values.items()}
    area["image"] = upgrade.images[asked_Q]
    return (chosen.mode.value if chosen else RAW), area


def upgrades(
    features: Floats, labels: NDArray[np.int64], hidden: int, seed: int
) -> Iterator[tuple[Upgrade, LabelRelevance]]:
    """Every kind of upgrade of one draw of classes."""
    generator = np.random.default_rng(seed)
    classes = generator.permutation(np.unique(labels))
    shown = classes[hidden:]
    train = np.flatnonzero(np.isin(labels, shown))
    train = generator.permutation(train)[:6_000]
    gallery = generator.permutation(np.flatnonzero(np.isin(labels, classes[:hidden])))
    query, item = gallery[:QUERIES], gallery[QUERIES:][:ITEMS]
    if len(item) < QUERIES // 2:
        query, item = gallery[: len(gallery) // 3], gallery[len(gallery) // 3 :]
    narrow = features[:, : features.shape[1] // 3]
    seen = train[np.isin(labels[train], shown[: len(shown) // 2])]
    old = unit(narrow @ discriminant(narrow[seen], labels[seen], OLD_DIM))
    new = unit(features @ discriminant(features[train], labels[train], NEW_DIM))
    means = class_means(old[train], labels[train])
    into_old = ridge(features[train], 0.5 * old[train] + 0.5 * means)
    bct = unit(features @ into_old)
    wide = np.hstack([bct, 0.7 * new[:, :OLD_DIM]])
    turned = unit(new @ rotation(new[train], old[train]))
    carried = unit(old @ ridge(old[train], new[train]))
    relevance = LabelRelevance(labels[query], labels[item], np.full(len(query), -1))

    def pair(queries: Floats, items: Floats) -> Compared:
        return Compared(queries[query].astype(np.float32), items[item].astype(np.float32), COSINE)

    yield Upgrade("identity", pair(bct, old), pair(bct, bct), query), relevance
    yield Upgrade("truncate", pair(bct, old), pair(unit(wide), unit(wide)), query), relevance
    yield Upgrade("zero_pad", pair(wide[:, : old.shape[1]] / 1.22, old), pair(unit(wide), unit(wide)), query), relevance
    yield Upgrade("matrix", pair(turned, old), pair(new, new), query), relevance
    yield Upgrade("dual", pair(old, old), pair(new, new), query), relevance
    yield Upgrade("forward", pair(new, carried), pair(new, new), query), relevance


def discriminant(x: Floats, labels: NDArray[np.int64], dim: int) -> Floats:
    """(D, dim) projection by linear discriminant analysis with a ridge."""
    means = class_means(x, labels)
    within = np.cov((x - means).T) + 0.05 * np.eye(x.shape[1]) * np.trace(np.cov(x.T)) / x.shape[1]
    values, vectors = np.linalg.eigh(_whitened(within, means))
    basis = _root(within) @ vectors[:, np.argsort(-values)[:dim]]
    return np.asarray(basis)


def _root(within: Floats) -> Floats:
    values, vectors = np.linalg.eigh(within)
    return np.asarray(vectors / np.sqrt(values) @ vectors.T)


def _whitened(within: Floats, means: Floats) -> Floats:
    root = _root(within)
    return np.asarray(root @ np.cov(means.T) @ root)


def class_means(x: Floats, labels: NDArray[np.int64]) -> Floats:
    """(N, D) the mean of each sample's class."""
    _, codes = np.unique(labels, return_inverse=True)
    sums = np.zeros((codes.max() + 1, x.shape[1]))
    np.add.at(sums, codes, x)
    return np.asarray((sums / np.bincount(codes)[:, None])[codes])


def ridge(x: Floats, y: Floats, strength: float = 1.0) -> Floats:
    """(D, E) regression of y on x."""
    return np.asarray(np.linalg.solve(x.T @ x + strength * np.eye(x.shape[1]), x.T @ y))


def rotation(x: Floats, y: Floats) -> Floats:
    """(D, E) orthogonal procrustes from x to y."""
    left, _, right = np.linalg.svd(x.T @ y, full_matrices=False)
    return np.asarray(left @ right)


def unit(x: Floats) -> Floats:
    return np.asarray(x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-9))


def describe(images: list[Image.Image], size: int) -> Floats:
    """(N, D) gradient histograms in cells and their mean colours, reduced by principal components."""
    cell, made = size // 8 if size >= 32 else size // 4, []
    for image in images:
        pixels = np.asarray(image.convert("RGB").resize((size, size)), np.float64) / 255
        down, across = np.gradient(pixels.mean(axis=2))
        strength, angle = np.hypot(down, across), np.arctan2(down, across) % np.pi
        bins = np.minimum((angle / np.pi * 8).astype(int), 7)
        parts = np.eye(8)[bins] * strength[..., None]
        grid = size // cell
        cells = np.concatenate([parts, pixels], axis=2).reshape(grid, cell, grid, cell, 11).mean(axis=(1, 3))
        made.append(np.sqrt(cells).ravel())
    x = np.stack(made)
    x -= x.mean(axis=0)
    values, vectors = np.linalg.eigh(np.cov(x.T))
    best = np.argsort(-values)[:180]
    return np.asarray(x @ vectors[:, best] / np.sqrt(values[best] + values[best[0]] * 0.01))


def read(name: str, root: Path | None) -> tuple[list[Image.Image], NDArray[np.int64]]:
    """Images and labels; PER_CLASS of each class where there are more."""
    if name == "digits":
        held = load_digits()
        pixels = (held.images * 15).astype(np.uint8)
        return [Image.fromarray(one) for one in pixels], held.target.astype(np.int64)
    assert root is not None
    packed = [np.load(root / name / file) for file in ("test.npz", *(["train-0.npz"] if name != "omniglot" else []))]
    images = [image for part in packed for image in unpacked(part)]
    labels = np.concatenate([part["labels"] for part in packed]).astype(np.int64)
    order = np.argsort(labels, kind="stable")
    within = np.arange(len(order)) - np.searchsorted(labels[order], labels[order])
    kept = order[within < PER_CLASS]
    return [images[n] for n in kept.tolist()], labels[kept]


def unpacked(part: np.lib.npyio.NpzFile) -> Iterator[Image.Image]:
    if "images" in part.files:
        yield from map(Image.fromarray, part["images"])
        return
    offsets, blob, height = part["offsets"], part["blob"].tobytes(), int(part["height"])
    for start, stop in itertools.pairwise(offsets):
        strip = Image.open(io.BytesIO(blob[start:stop])).convert("RGB")
        yield from (strip.crop((0, top, strip.width, top + height)) for top in range(0, strip.height, height))


if __name__ == "__main__":
    run_main(main)
