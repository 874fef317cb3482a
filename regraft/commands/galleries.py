"""`regraft gallery ...`: create, list, show and delete galleries, and change their index."""

from __future__ import annotations

from typing import Annotated

import typer

from index.engines.config import IndexKind, Storage
from regraft.client import Client
from regraft.models import GalleryInfo
from regraft.terminal.answers import answer, out
from regraft.terminal.command import Commands
from regraft.terminal.deletion import delete_named
from regraft.terminal.options import DryRun, Gallery, Yes
from regraft.terminal.printing import print_table, would

gallery = Commands(no_args_is_help=True, help="Create, list, show and delete galleries.")


@gallery.command("create")
def create(client: Client, name: Gallery) -> None:
    """Create an empty gallery."""
    created = client.create_gallery(name)
    answer(created)
    out.print(f"created gallery {name}")


@gallery.command("index")
def index(
    client: Client,
    name: Gallery,
    kind: Annotated[
        IndexKind, typer.Argument(help="Index; auto: inverted lists or a graph, whichever is faster at --recall.")
    ],
    storage: Annotated[Storage, typer.Option(help="How an approximate index stores vectors.")] = Storage.FLOAT32,
    recall: Annotated[float, typer.Option(help="Recall to reach: share of the exact ten best matches found.")] = 0.99,
    dry_run: DryRun = False,
) -> None:
    """Change a gallery's index while it serves."""
    options = {"kind": kind.value, "storage": storage.value, "recall": recall}
    changed = client.change_gallery(name, index=options, dry_run=dry_run)
    answer(changed)
    done = would(dry_run, "indexes", "index")
    out.print(f"{done} gallery {name} with {kind.value}, {storage.value}, recall {recall:g}")


@gallery.command("list")
def list_galleries(client: Client) -> None:
    """List all galleries."""
    found = client.galleries()
    answer(found)
    print_table(["gallery", "current", "items", "mix"], [[g.name, g.current, g.items, _mix(g)] for g in found])


@gallery.command("show")
def show(client: Client, name: Gallery) -> None:
    """Show a gallery: current version, number of items by version, index."""
    found = client.gallery(name)
    answer(found)
    out.print(f"{found.name}: current version {found.current}, {found.items} items ({_mix(found) or 'empty'})")
    if found.loading is not None:
        out.print(f"loading: {found.loading.done} of {found.loading.total} items; queries wait")
        return
    out.print(f"index {found.index.kind}: {found.indexed} items indexed, the others are searched exhaustively")


@gallery.command("delete")
def delete(client: Client, name: Gallery, yes: Yes = False, dry_run: DryRun = False) -> None:
    """Delete a gallery and all its items."""
    delete_named(client, "gallery", name, "all its items", yes=yes, dry_run=dry_run)


def _mix(found: GalleryInfo) -> str:
    return ", ".join(f"{version}: {count}" for version, count in found.mix.items())
