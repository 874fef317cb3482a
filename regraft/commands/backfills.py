"""`regraft backfill ...`: move items to a newer version, and watch it."""

from __future__ import annotations

from typing import Annotated

import typer

from regraft.client import Client
from regraft.commands.curves import (
    Evaluation,
    K,
    Label,
    Marks,
    Metric,
    Sample,
    Seed,
    curve_options,
    print_curve,
    summary_line,
)
from regraft.commands.plan import print_estimate
from regraft.models import BackfillInfo
from regraft.routes.backfills import BackfillOptions
from regraft.terminal.answers import answer, out
from regraft.terminal.command import Commands
from regraft.terminal.options import DryRun, Gallery, Newest, read_filter
from regraft.terminal.printing import print_fields, progress, would

backfill = Commands(no_args_is_help=True, help="Start, watch, pause, resume and cancel backfills.")
ITEMS_FAILED = 3
"""Exit code of a watched backfill that ended with failed items."""
Number = Annotated[int, typer.Argument(metavar="BACKFILL", help="Number of the backfill.")]
Watch = Annotated[bool, typer.Option("--watch", help="Show a progress bar until it ends; Ctrl-C only stops watching.")]


Version = Annotated[str | None, typer.Option("--version", help="Target version; it must be the current one.")]
Kind = Annotated[
    str,
    typer.Option("--kind", help="reencode (from images), transform (from stored embeddings) or supplied."),
]
Order = Annotated[
    str, typer.Option("--order", help="random, newest, oldest, uncertainty, traffic or transformed (those first).")
]
ChunkSize = Annotated[int | None, typer.Option("--chunk-size", min=1, help="Items per chunk.", show_default=False)]
Rate = Annotated[float | None, typer.Option("--rate", help="Maximum items per second.", show_default=False)]
Share = Annotated[
    float | None, typer.Option("--share", help="Maximum share of the items, above 0 and up to 1.", show_default=False)
]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="Maximum number of items.", show_default=False)]
Origin = Annotated[
    str | None,
    typer.Option("--origin", help="Only items of this origin: encoded, transformed or supplied.", show_default=False),
]
Filter = Annotated[
    str | None, typer.Option("--filter", help="Only items whose metadata match this JSON filter.", show_default=False)
]
Attempts = Annotated[int, typer.Option("--attempts", min=1, help="Attempts per item before it counts as failed.")]


@backfill.command("start")
def start(
    client: Client,
    name: Gallery,
    version: Version = None,
    kind: Kind = "reencode",
    order: Order = "random",
    chunk_size: ChunkSize = None,
    rate: Rate = None,
    share: Share = None,
    limit: Limit = None,
    origin: Origin = None,
    filter: Filter = None,  # noqa: A002 - the option's name
    attempts: Attempts = 3,
    label: Label = None,
    evaluation: Evaluation = None,
    metric: Metric = None,
    sample: Sample = None,
    k: K = None,
    seed: Seed = None,
    marks: Marks = None,
    watch: Watch = False,
    dry_run: DryRun = False,
) -> None:
    """Start a backfill to the current version; --label, --evaluation or --metric also measures its curve.

    Example: regraft backfill start photos --label label --rate 50 --watch
    """
    options = BackfillOptions(
        version=version,
        kind=kind,
        order=order,
        chunk_size=chunk_size,
        rate=rate,
        share=share,
        limit=limit,
        origin=origin,
        filter=None if filter is None else read_filter(filter),
        attempts=attempts,
        curve=curve_options(
            label=label, evaluation=evaluation, metric=metric, sample=sample, k=k, seed=seed, marks=marks
        ),
    )
    if dry_run:
        print_estimate(client.estimate_backfill(name, **options))
    else:
        _show(client, client.start_backfill(name, **options), watch)


@backfill.command("estimate")
def estimate(
    client: Client,
    name: Gallery,
    version: Version = None,
    kind: Kind = "reencode",
    rate: Rate = None,
    share: Share = None,
    limit: Limit = None,
    origin: Origin = None,
    filter: Filter = None,  # noqa: A002 - the option's name,
) -> None:
    """Estimate the time and storage of a backfill without starting it; the same as `start --dry-run`."""
    scope = {"version": version, "kind": kind, "share": share, "limit": limit, "origin": origin, "filter": filter}
    start(client, name, **scope, rate=rate, dry_run=True)


@backfill.command("list")
def list_backfills(client: Client, name: Gallery, limit: Newest = None) -> None:
    """List a gallery's backfills."""
    fields = ["id", "version", "kind", "state", "total", "done", "skipped", "failed"]
    print_fields(client.backfills(name, limit=limit), fields)


@backfill.command("show")
def show(client: Client, number: Number, watch: Watch = False) -> None:
    """Show a backfill, its curve and the items that failed."""
    _show(client, client.backfill(number), watch)


@backfill.command("watch")
def watch(client: Client, number: Number) -> None:
    """Show progress and curve until a backfill ends; exit code 3: items failed. Ctrl-C only stops watching."""
    _show(client, client.backfill(number), True)


@backfill.command("pause")
def pause(client: Client, number: Number, dry_run: DryRun = False) -> None:
    """Pause a backfill; chunks that workers hold are dropped and repeated after `resume`."""
    _print(client.pause_backfill(number, dry_run=dry_run), dry_run)


@backfill.command("resume")
def resume(client: Client, number: Number, watch: Watch = False, dry_run: DryRun = False) -> None:
    """Resume a paused backfill."""
    resumed = client.resume_backfill(number, dry_run=dry_run)
    if dry_run:
        _print(resumed, dry_run)
    else:
        _show(client, resumed, watch)


@backfill.command("cancel")
def cancel(client: Client, number: Number, dry_run: DryRun = False) -> None:
    """Cancel a backfill; items already moved stay moved."""
    _print(client.cancel_backfill(number, dry_run=dry_run), dry_run)


def _show(client: Client, shown: BackfillInfo, watch: bool) -> None:
    shown = _watch(client, shown) if watch else shown
    failures = list(client.backfill_failures(shown.id)) if shown.failed else []
    answer({**shown.model_dump(), "failures": failures})
    _print_state(shown)
    if shown.curve is not None:
        print_curve(shown.curve)
    if shown.failed:
        for failure in failures:
            out.print(f"  {failure.item}: {failure.reason}")
        if watch:
            raise typer.Exit(ITEMS_FAILED)


def _watch(client: Client, watched: BackfillInfo) -> BackfillInfo:
    with progress() as bar:
        task = bar.add_task(f"backfill {watched.id} to {watched.version}", total=watched.total)
        newest = watched
        for newest in client.watch_backfill(watched.id):
            answer(newest)
            bar.update(task, completed=newest.total - newest.remaining, total=newest.total)
            status = "planning" if newest.planning else newest.curve and summary_line(newest.curve)
            bar.update(
                task,
                description=f"backfill {watched.id}: {status}"
                if status
                else f"backfill {watched.id} to {watched.version}",
            )
    return newest


def _print(shown: BackfillInfo, dry_run: bool = False) -> None:
    answer(shown)
    _print_state(shown, dry_run)


def _print_state(shown: BackfillInfo, dry_run: bool = False) -> None:
    counts = ", ".join(f"{getattr(shown, name)} {name}" for name in ("done", "skipped", "failed", "remaining"))
    state = would(dry_run, "is", "be")
    planning = ", planning" if shown.planning else ""
    out.print(f"backfill {shown.id}: {shown.kind} to {shown.version} {state} {shown.state}{planning} ({counts})")
