"""`regraft audit`: who changed what, when and why."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from regraft.commands.answers import answer
from regraft.commands.options import URL, ApiKey, Url, connect, print_table


def audit(
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000, help="Rows, the newest first.")] = 20,
    url: Url = URL,
    api_key: ApiKey = None,
) -> None:
    """List who changed what outside deployments, when and why."""
    with connect(url, api_key) as client:
        found = client.audit(limit=limit)
    answer(found)
    rows = [
        [time.strftime("%F %T", time.localtime(row.at)), row.who, row.action, row.subject, row.why] for row in found
    ]
    print_table(["when", "who", "action", "subject", "why"], rows)
