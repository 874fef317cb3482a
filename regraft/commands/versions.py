"""`regraft version ...`: verify and pack version folders; register, list and delete versions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from index.version_folder.archive import pack_version
from index.version_folder.folder import load_version
from index.version_folder.new_folder import check_outside
from regraft.client import Client
from regraft.commands.create import create
from regraft.terminal.answers import answer, out
from regraft.terminal.command import Commands
from regraft.terminal.deletion import delete_named
from regraft.terminal.extras import needs
from regraft.terminal.options import DryRun, Yes
from regraft.terminal.printing import print_table, would

version = Commands(no_args_is_help=True, help="Create, verify, pack, register, list and delete versions.")
Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="A version folder.", exists=True, file_okay=False)]


version.command("create")(create)


@version.command("verify")
def verify(folder: Folder) -> None:
    """Verify a version folder as at registration, except that edges are not compared with their older versions."""
    with needs("worker"):
        from index.encoders.encoder import verify_version
    checked = verify_version(folder, batches=True)
    card = checked.card
    held = [{"kind": edge.kind.value, "old": edge.old} for edge in checked.edges]
    answer({"name": card.name, "dim": card.dim, "space": card.space, "method": card.method, "edges": held})
    edges = ", ".join(f"{edge.kind.value} to {edge.old}" for edge in checked.edges) or "none"
    out.print(f"{card.name}: {card.dim} numbers, {card.space['kind']}, method {card.method}; edges: {edges}")


@version.command("pack")
def pack(
    folder: Folder,
    archive: Annotated[
        Path | None, typer.Argument(metavar="ARCHIVE", help="File to write; default: NAME.zip in the current folder.")
    ] = None,
) -> None:
    """Write a version folder as a .zip."""
    checked = load_version(folder)
    target = archive or Path(f"{checked.name}.zip")
    check_outside(target.resolve())
    pack_version(folder, target)
    answer({"name": checked.name, "file": target})
    out.print(f"wrote {target}")


@version.command("register")
def register(
    client: Client,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER|ZIP", help="A version folder or its .zip.", exists=True)],
    dry_run: DryRun = False,
) -> None:
    """Register a version with the service."""
    registered = client.register_version(folder, dry_run=dry_run)
    answer(registered)
    out.print(f"{would(dry_run, 'registered', 'register')} {registered.name}")


@version.command("delete")
def delete(
    client: Client,
    name: Annotated[str, typer.Argument(metavar="VERSION", help="Name of the version.")],
    yes: Yes = False,
    dry_run: DryRun = False,
) -> None:
    """Delete an unused version and the edges from it."""
    delete_named(client, "version", name, "its edges", yes=yes, dry_run=dry_run)


@version.command("list")
def list_versions(client: Client) -> None:
    """List all versions of the service."""
    found = client.versions()
    answer(found)
    rows = [[v.name, v.dim, v.space["kind"], v.method, " ".join(f"{e.kind}->{e.old}" for e in v.edges)] for v in found]
    print_table(["version", "dim", "space", "method", "edges"], rows)
    for v in found:
        if v.problem:
            out.print(f"{v.name} is quarantined: {v.problem}")
