"""`regraft key ...`: API keys by name, each for what its owner may do."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from regraft.client import Client
from regraft.commands.answers import answer, err, out
from regraft.commands.command import Commands
from regraft.commands.options import DryRun, Yes, confirm_deleting, print_table, would
from regraft.models import KeyInfo, KeyScope

key = Commands(no_args_is_help=True, help="Make, list and delete API keys.")
KeyName = Annotated[str, typer.Argument(metavar="NAME", help="The key's name, which the audit shows.")]


@key.command("create")
def create(
    client: Client,
    name: KeyName,
    scope: Annotated[
        KeyScope, typer.Option("--scope", help="What it opens: reading and queries; changes of items, too; everything.")
    ],
    gallery: Annotated[
        list[str] | None, typer.Option("--gallery", help="A gallery it opens, in place of all; may be repeated.")
    ] = None,
) -> None:
    """Make a key and show it, this once."""
    made = client.create_api_key(name, scope, galleries=gallery or None)
    answer(made)
    out.print(made.key, soft_wrap=True)
    err.print(f"key {name} is made, with the scope {scope} for {_galleries(made)}: it is not shown again")


@key.command("list")
def list_keys(client: Client) -> None:
    """List the keys there are, by name."""
    found = client.api_keys()
    answer(found)
    rows = [
        [one.name, one.scope, _galleries(one), time.strftime("%F %T", time.localtime(one.created))] for one in found
    ]
    print_table(["key", "scope", "galleries", "created"], rows)


@key.command("delete")
def delete(client: Client, name: KeyName, yes: Yes = False, dry_run: DryRun = False) -> None:
    """Have a key open nothing any more, within a second."""
    confirm_deleting(f"key {name}", yes=yes or dry_run)
    client.delete_api_key(name, dry_run=dry_run)
    answer({"key": name, "deleted": not dry_run, "dry_run": dry_run})
    out.print(f"{would(dry_run, 'deleted', 'delete')} key {name}")


def _galleries(of: KeyInfo) -> str:
    return "all galleries" if of.galleries is None else ", ".join(of.galleries)
