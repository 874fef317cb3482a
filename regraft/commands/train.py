"""`regraft train`, `evaluate`, `fit-edge` and `export`, which need the extra `train`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from index.errors import InvalidArgument
from index.version_folder.folder import load_given_version
from index.version_folder.new_folder import check_new
from regraft.terminal.answers import answer, err, out
from regraft.terminal.extras import needs
from regraft.terminal.stopping import stoppable

if TYPE_CHECKING:
    from index.version import Version
    from training.data.images import Data

EXTRA = "train"
Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="A version folder of `regraft train`.")]
Source = Annotated[
    str | None,
    typer.Option("--data", metavar="SOURCE", help="A data source, such as folders or arrays (`training.sources`)."),
]
Root = Annotated[str, typer.Option("--root", help="Folder or file of the data source, if it has one.")]
Unreadable = Annotated[
    str | None,
    typer.Option(
        "--unreadable",
        help="refuse or skip images that cannot be decoded; default: as in the training of the newest version.",
    ),
]


def train(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="Name of a recipe (see `regraft recipes`), or a .toml file.")
    ],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Change a field of the recipe; may be repeated."),
    ] = None,
    size: Annotated[
        int | None,
        typer.Option("--size", min=1, max=4096, help="Input size of the encoder in pixels, for square images."),
    ] = None,
    target: Annotated[
        Path | None,
        typer.Option("--out", metavar="FOLDER", help="Version folder to write; its name becomes the version's name."),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(
            "--save", metavar="FILE", help="Write the recipe with the changes of --set to this file, without training."
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing version folder.")] = False,
) -> None:
    """Train a version; a rerun continues after an interruption.

    Example: regraft train folders_v1 --set root=IMAGES --size 96 --set epochs=10 --out runs/v1
    """
    with needs(EXTRA), stoppable():
        from training.recipes import find_recipe

        if not recipe.endswith(".toml"):
            find_recipe(recipe)  # before torch is imported, which takes seconds
        from training.processes import is_rank_zero, leave_group
        from training.recipe_file import choose
        from training.references import folder_of
        from training.train import train as train_version

        chosen = choose(recipe, settings or (), size)
        if save is not None:
            saved = chosen.write(save)
            answer({"recipe": saved})
            out.print(f"wrote {saved}; `regraft train {save}` trains it")
            return
        folder = target or folder_of(chosen.recipe)
        if not overwrite:
            check_new(folder)
        written = train_version(chosen.recipe, folder, references=chosen.references)
        if is_rank_zero():
            answer({"folder": written})
            out.print(f"wrote {written}")
        leave_group()


def evaluate(
    folders: Annotated[
        list[Path], typer.Argument(metavar="FOLDER...", help="Version folders; their edges define which is older.")
    ],
    source: Source = None,
    root: Root = "",
    unreadable: Unreadable = None,
    independent: Annotated[
        list[str] | None,
        typer.Option(
            "--independent",
            metavar="[NAME=]FOLDER",
            help="An independently trained version, for P_com and P_up of NAME, or of all newer ones.",
        ),
    ] = None,
    order: Annotated[
        list[str] | None,
        typer.Option("--order", help="Order of the backfill curves: random, uncertainty, oldest, newest."),
    ] = None,
    metric: Annotated[str, typer.Option("--metric", help="Metric of the curves: cmc@1, cmc@5 or mAP@1.0.")] = "cmc@1",
    old_embeddings: Annotated[
        Path | None,
        typer.Option(
            "--old-embeddings",
            metavar="FILE",
            help="An .npz of embeddings by the version without an encoder; default: that of the training.",
        ),
    ] = None,
    verification: Annotated[bool, typer.Option("--verification", help="Also measure TAR@FAR and TPIR@FPIR.")] = False,
    target: Annotated[
        Path | None,
        typer.Option("--out", metavar="FOLDER", help="Also write evaluation.json and plots to this folder."),
    ] = None,
) -> None:
    """Measure versions against each other and simulate backfills.

    Example: regraft evaluate runs/v1 runs/v2 --data folders --root IMAGES --out runs/evaluation
    """
    versions = [load_given_version(folder) for folder in folders]
    with needs(EXTRA):
        from training.data.checks import warn_of_repeats
        from training.evaluation.matrix import ORDERS
        from training.evaluation.matrix import evaluate as evaluate_versions
        from training.evaluation.report import check_evaluation_folder, write_evaluation
        from training.evaluation.tables import as_json, lines

        if target is not None:
            check_evaluation_folder(target)
        data = _load(source, root, unreadable, _newest(versions), _stored(old_embeddings, versions))
        measured = evaluate_versions(
            versions,
            data,
            independents=_independents(independent or [], versions),
            orders=order or ORDERS,
            metric=metric,
            verification=verification,
        )
        warn_of_repeats(data, trained_on=False)
        files = [] if target is None else write_evaluation(measured, target)
        answer({**as_json(measured), "files": files})
        for line in lines(measured):
            out.print(line)
        for path in files:
            out.print(f"wrote {path}")


def fit_edge(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="Folder of the older version.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="Folder of the newer version; the edge is written there.")],
    kind: Annotated[str, typer.Option("--kind", help="procrustes, ridge, low_rank, mlp, slerp, zero_pad or auto.")],
    pairs: Annotated[
        Path | None,
        typer.Option("--pairs", metavar="FILE", help="An .npz of embeddings `new` and `old`, optionally `labels`."),
    ] = None,
    source: Source = None,
    root: Root = "",
    unreadable: Unreadable = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Change a setting of the kind; may be repeated."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the existing edge from NEW to OLD.")] = False,
) -> None:
    """Fit an edge between two version folders on pairs of embeddings.

    For versions and items of a service, use `regraft edge fit NEW OLD`.

    Example: regraft fit-edge runs/v1 runs/v2 --kind procrustes --data folders --root IMAGES
    """
    for folder in (old, new):
        if not folder.is_dir():
            raise InvalidArgument(
                f"{folder} is not a version folder; for versions of a service use `regraft edge fit NEW OLD`"
            )
    older, newer = load_given_version(old), load_given_version(new)
    if (pairs is None) == (source is None):
        raise InvalidArgument("exactly one of --pairs and --data is required")
    with needs(EXTRA):
        from training.adapters.fit_edge import check_fit, read_options
        from training.adapters.fit_edge import fit_edge as fit
        from training.adapters.pairs import embed_pairs, read_pairs
        from training.adapters.residual_mlp import FewPairsWarning
        from training.data.checks import warn_of_repeats

        options = read_options(kind, settings or [])
        check_fit(older, newer, kind, overwrite)
        if pairs is not None:
            given = read_pairs(pairs, older, newer)
        else:
            data = _load(source, root, unreadable, newer)
            warn_of_repeats(data)
            given = embed_pairs(data, older, newer)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", FewPairsWarning)
            fitted = fit(older, newer, given, kind, options, overwrite=overwrite)
    for warning in said:
        err.print(f"warning: {warning.message}", style="yellow")
    answer(fitted.as_json())
    for line in fitted.lines():
        out.print(line)


def export(
    folder: Folder,
    target: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Version folder to write; may be FOLDER.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace another version folder.")] = False,
) -> None:
    """Export the ONNX models of a trained version that has none."""
    with needs(EXTRA):
        from training.export import export as export_version

        if not overwrite and target.resolve() != folder.resolve():
            check_new(target)
        written = export_version(folder, target)
    answer({"folder": written})
    out.print(f"wrote {written}")


def _load(
    source: str | None,
    root: str,
    unreadable: str | None,
    newest: Version,
    stored: tuple[Path, Version] | None = None,
) -> Data:
    """Load the named data set, by default that of the newest version; likewise the treatment of unreadable images."""
    from training.sources import SOURCES, load_data

    recipe = newest.card.recipe
    if source is None and "data" not in recipe:
        raise InvalidArgument("--data is required: the newest version's card names no data set", pointer="/data")
    if source is not None and source in SOURCES and SOURCES[source][1] and not root:
        raise InvalidArgument(f"--data {source} requires --root, {SOURCES[source][1]}", pointer="/root")
    name, place = (source, root) if source else (recipe["data"], root or recipe["root"])
    return load_data(name, place, unreadable or recipe.get("unreadable", "refuse"), stored)


def _stored(file: Path | None, versions: list[Version]) -> tuple[Path, Version] | None:
    """The file of embeddings and its version: the one that does not embed images."""
    from training.trained import WEIGHTS

    trained_with = _newest(versions).card.recipe.get("old_embeddings")
    mute = [v for v in versions if not v.card.encoder and WEIGHTS not in v.card.files]
    if file is not None and len(mute) != 1:
        raise InvalidArgument(
            f"--old-embeddings requires exactly one version without an encoder, not {len(mute)}",
            pointer="/old_embeddings",
        )
    chosen = file or (Path(trained_with) if trained_with else None)
    return (chosen, mute[0]) if chosen and len(mute) == 1 else None


def _newest(versions: list[Version]) -> Version:
    from training.evaluation.cross_version import oldest_first

    named = {version.name: version for version in versions}
    return named[oldest_first(named)[-1]]


def _independents(given: list[str], versions: list[Version]) -> dict[str, Version]:
    """Parse NAME=FOLDER, for one version, or FOLDER, for every version with edges that is not named."""
    names = {version.name for version in versions}
    own = {name: folder for name, is_own, folder in (text.partition("=") for text in given) if is_own and name in names}
    shared = [text for text in given if text.partition("=")[0] not in own]
    everyone = dict.fromkeys((v.name for v in versions if v.edges), shared[-1]) if shared else {}
    if shared and not everyone:
        raise InvalidArgument(
            f"--independent {shared[-1]} has no effect: none of {', '.join(sorted(names))} has an edge",
            pointer="/independent",
        )
    return {name: load_given_version(Path(folder)) for name, folder in (everyone | own).items()}
