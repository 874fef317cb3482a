"""`regraft backfill ...`: move items to a newer version, and watch it."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from regraft.client import Client, Json
from regraft.commands.options import URL, ApiKey, Gallery, Url, connect, out, print_table, progress

WATCH_SECONDS = 0.5
ACTIVE = frozenset({"running", "paused"})

backfill = typer.Typer(no_args_is_help=True, help="Start, watch, pause, resume and cancel backfills.")
Number = Annotated[int, typer.Argument(metavar="BACKFILL", help="Number of the backfill.")]
Watch = Annotated[bool, typer.Option("--watch", help="Show a progress bar until it ends; Ctrl-C only stops watching.")]


@backfill.command("start")
def start(
    name: Gallery,
    version: Annotated[
        str | None, typer.Option(help="Target; default the current version.", show_default=False)
    ] = None,
    kind: Annotated[
        str, typer.Option(help="reencode (from images) or transform (from stored embeddings).")
    ] = "reencode",
    order: Annotated[str, typer.Option(help="random, newest or oldest.")] = "random",
    chunk_size: Annotated[int, typer.Option(min=1, help="Items a worker takes at once.")] = 64,
    rate: Annotated[float | None, typer.Option(help="Items a second at most.", show_default=False)] = None,
    watch: Watch = False,
    url: Url = URL,
    api_key: ApiKey = None,
) -> None:
    """Start moving a gallery's items to a version."""
    with connect(url, api_key) as client:
        started = client.start_backfill(name, version=version, kind=kind, order=order, chunk_size=chunk_size, rate=rate)
        _show(client, started, watch)


@backfill.command("list")
def list_backfills(name: Gallery, url: Url = URL, api_key: ApiKey = None) -> None:
    """List a gallery's backfills."""
    columns = ["id", "version", "kind", "state", "total", "done", "skipped", "failed"]
    with connect(url, api_key) as client:
        found = client.backfills(name)
    print_table(columns, [[backfill[column] for column in columns] for backfill in found])


@backfill.command("show")
def show(number: Number, watch: Watch = False, url: Url = URL, api_key: ApiKey = None) -> None:
    """Show one backfill and the items it could not move."""
    with connect(url, api_key) as client:
        _show(client, client.backfill(number), watch)


@backfill.command("pause")
def pause(number: Number, url: Url = URL, api_key: ApiKey = None) -> None:
    """Pause a backfill; workers stop after the chunk in hand."""
    with connect(url, api_key) as client:
        _print(client.pause_backfill(number))


@backfill.command("resume")
def resume(number: Number, watch: Watch = False, url: Url = URL, api_key: ApiKey = None) -> None:
    """Go on with a paused backfill."""
    with connect(url, api_key) as client:
        _show(client, client.resume_backfill(number), watch)


@backfill.command("cancel")
def cancel(number: Number, url: Url = URL, api_key: ApiKey = None) -> None:
    """End a backfill; what it moved stays moved."""
    with connect(url, api_key) as client:
        _print(client.cancel_backfill(number))


def _show(client: Client, shown: Json, watch: bool) -> None:
    _print(_watch(client, shown) if watch else shown)
    if shown["failed"]:
        for failure in client.backfill_failures(shown["id"]):
            out.print(f"  {failure['item']}: {failure['reason']}", markup=False)


def _watch(client: Client, watched: Json) -> Json:
    with progress() as bar:
        task = bar.add_task(f"backfill {watched['id']} to {watched['version']}", total=watched["total"])
        while True:
            moved = watched["total"] - watched["remaining"]
            bar.update(task, completed=moved, total=watched["total"])
            if watched["state"] not in ACTIVE:
                return watched
            time.sleep(WATCH_SECONDS)
            watched = client.backfill(watched["id"])


def _print(shown: Json) -> None:
    counts = ", ".join(f"{shown[name]} {name}" for name in ("done", "skipped", "failed", "remaining"))
    out.print(f"backfill {shown['id']}: {shown['kind']} to {shown['version']} is {shown['state']} ({counts})")
