"""`regraft audit`: who changed what, when and why."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from regraft.client import Client
from regraft.terminal.answers import answer
from regraft.terminal.printing import print_table


def audit(
    client: Client,
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000, help="Maximum number of rows, newest first.")] = 20,
) -> None:
    """List changes outside deployments: when, who, what and why."""
    found = client.audit(limit=limit)
    answer(found)
    rows = [
        [time.strftime("%F %T", time.localtime(row.at)), row.who, row.action, row.subject, row.why] for row in found
    ]
    print_table(["when", "who", "action", "subject", "why"], rows)
