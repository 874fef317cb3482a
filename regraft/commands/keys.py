"""`regraft key ...`: create, list and delete API keys."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from regraft.client import Client
from regraft.models import KeyInfo, KeyScope
from regraft.terminal.answers import answer, err, out
from regraft.terminal.command import Commands
from regraft.terminal.deletion import confirm_deleting
from regraft.terminal.options import DryRun, Yes
from regraft.terminal.printing import print_table, would

key = Commands(no_args_is_help=True, help="Create, list and delete API keys.")
KeyName = Annotated[str, typer.Argument(metavar="NAME", help="Name of the key, as the audit shows it.")]


@key.command("create")
def create(
    client: Client,
    name: KeyName,
    scope: Annotated[
        KeyScope, typer.Option("--scope", help="query: read and search; ingest: also change items; admin: everything.")
    ],
    gallery: Annotated[
        list[str] | None,
        typer.Option("--gallery", help="Limit the key to this gallery; may be repeated. Default: all galleries."),
    ] = None,
) -> None:
    """Create a key and show it; it cannot be shown again."""
    made = client.create_api_key(name, scope, galleries=gallery or None)
    answer(made)
    out.print(made.key, soft_wrap=True)
    err.print(f"created key {name}, scope {scope}, {_galleries(made)}; it is not shown again")


@key.command("list")
def list_keys(client: Client) -> None:
    """List all keys by name."""
    found = client.api_keys()
    answer(found)
    rows = [
        [one.name, one.scope, _galleries(one), time.strftime("%F %T", time.localtime(one.created))] for one in found
    ]
    print_table(["key", "scope", "galleries", "created"], rows)


@key.command("delete")
def delete(client: Client, name: KeyName, yes: Yes = False, dry_run: DryRun = False) -> None:
    """Delete a key; it stops working within a second."""
    confirm_deleting(f"key {name}", yes=yes or dry_run)
    client.delete_api_key(name, dry_run=dry_run)
    answer({"key": name, "deleted": not dry_run, "dry_run": dry_run})
    out.print(f"{would(dry_run, 'deleted', 'delete')} key {name}")


def _galleries(of: KeyInfo) -> str:
    return "all galleries" if of.galleries is None else ", ".join(of.galleries)
