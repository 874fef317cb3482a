"""Ask before something is deleted, and report that it was."""

from __future__ import annotations

import sys

import typer

from index.errors import InvalidArgument
from regraft.client import Client
from regraft.terminal.answers import answer, out
from regraft.terminal.console import visible
from regraft.terminal.printing import would


def delete_named(client: Client, what: str, name: str, rest: str, *, yes: bool, dry_run: bool) -> None:
    """Delete a gallery or a version and report it; asks first, unless `yes`. `rest`: what is deleted with it."""
    confirm_deleting(f"{what} {name} and {rest}", yes=yes or dry_run)
    delete = {"gallery": client.delete_gallery, "version": client.delete_version}[what]
    delete(name, dry_run=dry_run)
    answer({what: name, "deleted": not dry_run, "dry_run": dry_run})
    out.print(f"{would(dry_run, 'deleted', 'delete')} {what} {name}")


def confirm_deleting(what: str, *, yes: bool) -> None:
    """Ask to confirm a deletion unless `yes`. Raises InvalidArgument if nobody can be asked, or no input confirms."""
    if yes:
        return
    if answer.requested:
        raise InvalidArgument(f"--json asks no questions: add --yes to delete {what}", pointer="/yes")
    try:
        typer.confirm(f"Delete {visible(what)}?", abort=True)
    except typer.Abort:
        if sys.stdin.isatty():
            raise
        raise InvalidArgument(f"nobody confirmed: add --yes to delete {what}", pointer="/yes") from None
