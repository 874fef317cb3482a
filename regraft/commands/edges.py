"""`regraft edge ...`: list, add, fit, check and remove edges between versions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from index.errors import InvalidArgument
from regraft.client import Client
from regraft.models import EdgeInfo, ScoreInterval
from regraft.terminal.answers import answer, err, out
from regraft.terminal.command import Commands
from regraft.terminal.options import DryRun
from regraft.terminal.printing import print_table, score, would

edge = Commands(no_args_is_help=True, help="List, add, fit, check and remove edges between versions.")
New = Annotated[str, typer.Argument(metavar="NEW", help="Version of the queries.")]
Old = Annotated[str, typer.Argument(metavar="OLD", help="Version of the items.")]
Kind = Annotated[str, typer.Argument(metavar="KIND")]
InGallery = Annotated[str | None, typer.Option("--gallery", help="Use items of this gallery.", show_default=False)]
FOLDERS_ONLY = {"mlp", "zero_pad"}
"""Kinds that only `regraft fit-edge` fits, not a service."""
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of the sample.")]
Replace = Annotated[bool, typer.Option("--replace", help="Replace the existing edge of this kind.")]


@edge.command("list")
def list_edges(
    client: Client,
    new: Annotated[str | None, typer.Option("--new", help="Only from this version.", show_default=False)] = None,
    old: Annotated[str | None, typer.Option("--old", help="Only to this version.", show_default=False)] = None,
) -> None:
    """List the service's edges with their measured scores."""
    found = client.edges(new=new, old=old)
    answer(found)
    print_table(["new", "old", "kind", "origin", "cmc@1", "pairs", "calibrated"], [_row(edge) for edge in found])


@edge.command("add")
def add(
    client: Client,
    new: New,
    old: Old,
    folder: Annotated[
        Path | None, typer.Argument(metavar="FOLDER|ZIP", help="Folder or .zip of an edge.", exists=True)
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option("--kind", help="Instead of a folder: identity, truncate or zero_pad.", show_default=False),
    ] = None,
    gallery: InGallery = None,
    items: Annotated[int, typer.Option("--items", min=1, help="With --gallery: items to verify it on.")] = 100,
    seed: Seed = 0,
    replace: Replace = False,
    dry_run: DryRun = False,
) -> None:
    """Add an edge; with --kind it is verified first: identity always, the others with --gallery.

    Example: regraft edge add v2 v1 --kind truncate --gallery photos
    """
    if (folder is None) == (kind is None):
        raise InvalidArgument("give either a folder or --kind")
    if folder is not None and gallery:
        raise InvalidArgument("--gallery requires --kind: the folder of an edge has its own scores", pointer="/gallery")
    verify = {"gallery": gallery, "items": items, "seed": seed} if gallery else None
    if folder is not None:
        added = client.add_edge(new, old, folder, replace=replace, dry_run=dry_run)
    else:
        added = client.declare_edge(new, old, kind or "", verify=verify, replace=replace, dry_run=dry_run)
    _print_edge(would(dry_run, "added", "add"), added)


@edge.command("fit")
def fit(
    client: Client,
    new: New,
    old: Old,
    kind: Annotated[str, typer.Option("--kind", help="procrustes, ridge, low_rank or slerp; auto: the best of them.")],
    pairs: Annotated[
        Path | None,
        typer.Option(
            "--pairs",
            metavar="FILE",
            help="Instead of stored items: an .npz of embeddings `new` and `old`, optionally `labels`.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    gallery: InGallery = None,
    label: Annotated[
        str | None,
        typer.Option("--label", help="Metadata field with the label of each item, for measuring.", show_default=False),
    ] = None,
    sample: Annotated[int, typer.Option("--sample", min=1, help="Maximum number of items in the sample.")] = 5000,
    embed: Annotated[
        int,
        typer.Option(
            "--embed", min=0, help="If fewer items have both embeddings: embed up to this many images and texts now."
        ),
    ] = 0,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=NUMBER", help="An option of the kind; may be repeated.")
    ] = None,
    seed: Seed = 0,
    replace: Replace = False,
    dry_run: DryRun = False,
) -> None:
    """Fit an edge on stored items with embeddings by both versions, or on a file of pairs.

    For version folders on this machine, and for the kinds mlp and zero_pad, use `regraft fit-edge OLD NEW`.

    Example: regraft edge fit v2 v1 --kind procrustes --gallery photos --label label
    """
    if kind in FOLDERS_ONLY:
        raise InvalidArgument(
            f"--kind {kind} is fitted on version folders: run `regraft fit-edge OLD NEW --kind {kind}`, then "
            "`regraft edge add`; the service fits procrustes, ridge, low_rank and slerp",
            pointer="/kind",
        )
    if pairs is not None and (gallery or label or embed):
        raise InvalidArgument(
            "--pairs cannot be used with --gallery, --label or --embed; labels are an array of the file"
        )
    stored: dict[str, Any] = {"gallery": gallery, "label": label, "sample": sample}
    if embed:
        stored["embed"] = embed
    if pairs is not None:
        stored = {"pairs": pairs}
    asked: dict[str, Any] = {**stored, "options": _numbers(settings or [])}
    fitted = client.fit_edge(new, old, kind, seed=seed, replace=replace, dry_run=dry_run, **asked)
    _print_edge(would(dry_run, "fitted", "add"), fitted)


@edge.command("check")
def check(
    client: Client,
    new: New,
    old: Old,
    kind: Kind,
    vectors: Annotated[
        Path | None,
        typer.Option(
            "--vectors", metavar="FILE", help="Query embeddings by NEW: an .npy with one row each.", dir_okay=False
        ),
    ] = None,
    gallery: Annotated[
        str | None,
        typer.Option(
            "--gallery", help="Instead of --vectors: this gallery's items with embeddings by NEW.", show_default=False
        ),
    ] = None,
    sample: Annotated[int, typer.Option("--sample", min=1, help="Maximum number of items in the sample.")] = 1000,
    seed: Seed = 0,
) -> None:
    """Measure how far queries are from the pairs that an edge was fitted on.

    Example: regraft edge check v2 v1 matrix --vectors queries.npy
    """
    if (vectors is None) == (gallery is None):
        raise InvalidArgument("give either --vectors or --gallery")
    found = client.check_edge(new, old, kind, vectors=vectors, gallery=gallery, sample=sample, seed=seed)
    answer(found)
    out.print(found.advice)
    out.print(f"similarity to the nearest pair: median {found.nearest:.3f}; out of domain below {found.least:.3f}")


@edge.command("remove")
def remove(
    client: Client,
    new: New,
    old: Old,
    kind: Kind,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what depends on the edge.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Remove it even if items become unreachable.")] = False,
    reason: Annotated[str, typer.Option("--reason", help="Reason, kept in the audit; required with --force.")] = "",
) -> None:
    """Remove an edge, after a check for dependents."""
    removal = client.remove_edge(new, old, kind, dry_run=dry_run, force=force, reason=reason)
    answer(removal)
    for number in removal.blocked_by:
        out.print(f"backfill {number} uses it")
    for gallery in removal.dependents:
        for route in gallery.routes:
            after = "nothing" if route.after is None else " ".join(route.after) or "directly"
            out.print(f"{gallery.gallery}: {route.items} items of {route.version} then use {after}")
        out.print(f"{gallery.gallery}: {gallery.moved} items move, {gallery.lost} become unreachable")
    out.print(f"{would(dry_run, 'removed', 'remove')} {new} -> {old}, {kind}")


def _row(edge: EdgeInfo) -> list[object]:
    measured = edge.scores.get("cmc@1")
    calibrated = "yes" if edge.calibration else "no"
    cells = [edge.new, edge.old, edge.kind, edge.problem or edge.origin]
    return [*cells, score(measured) if measured else "", edge.support or "", calibrated]


def _print_edge(done: str, edge: EdgeInfo) -> None:
    answer(edge)
    out.print(f"{done} {edge.new} -> {edge.old}, {edge.kind}")
    for metric, measured in edge.scores.items():
        out.print(f"{metric}: {score(measured)}")
    for source in ("probes", "items"):
        if compared := edge.made.get(source):
            out.print(f"{compared['images']} {source} compared, at most {compared['distance']:.2g} apart")
    for kind, reached in edge.made.get("tried", {}).items():
        out.print(f"tried {kind}: cmc@1 {score(ScoreInterval(**reached['cmc@1']))} on held-out pairs")
    for kind, why in edge.made.get("left_out", {}).items():
        out.print(f"left out {kind}: {why}")
    for sentence in edge.made.get("advice", []):
        out.print(sentence)
    if edge.warning:
        err.print(f"warning: {edge.warning}", style="yellow")


def _numbers(settings: list[str]) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        try:
            numbers[name] = float(value)
        except ValueError:
            raise InvalidArgument(f"--set takes NAME=NUMBER, not {setting!r}", pointer="/set") from None
    return numbers
