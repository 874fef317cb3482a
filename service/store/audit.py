"""The audit log: who changed what, when and why, for changes without a record of their own.

Deployments and gates have their own records (`deployment_transition`, `gate_report`); a dry run leaves none.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, insert

from service.store.tables import audit


@dataclass(frozen=True)
class ChangeContext:
    """Who requests a change, and whether it is a dry run.

    Attributes:
        who: the name of the API key; "local" if none is required.
        dry_run: check and answer as usual, but change nothing.
    """

    who: str
    dry_run: bool

    def status(self, done: int) -> int:
        """The status of the response: `done`, or 200 for a dry run."""
        return 200 if self.dry_run else done


def record(connection: Connection, who: str, action: str, subject: str, why: str = "", **evidence: Any) -> None:
    """Record a change, in the transaction that makes it."""
    values = {"at": time.time(), "who": who, "action": action, "subject": subject, "why": why, "evidence": evidence}
    connection.execute(insert(audit).values(values))
