"""Who changed what, when and why: a row for each change that leaves no other record of itself.

Deployments and gates keep their own (`deployment_transition`, `gate_report`); a dry run leaves none.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, insert

from service.store.tables import audit


@dataclass(frozen=True)
class ChangeContext:
    """Who asks for a change, and whether it is made.

    Attributes:
        who: the name of the API key, "local" where none is needed.
        dry_run: check and answer as if, but change nothing.
    """

    who: str
    dry_run: bool

    def status(self, done: int) -> int:
        """The status to answer with: `done`, or 200 when nothing was."""
        return 200 if self.dry_run else done


def record(connection: Connection, who: str, action: str, subject: str, why: str = "", **evidence: Any) -> None:
    """Note a change, in the transaction that makes it."""
    values = {"at": time.time(), "who": who, "action": action, "subject": subject, "why": why, "evidence": evidence}
    connection.execute(insert(audit).values(values))
