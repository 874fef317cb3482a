"""`regraft doctor`: find damaged or lost data."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from regraft.commands.settings import Data, UnusableDatabase, apply_options, checked_settings, usable_database
from regraft.terminal.answers import answer, err, out
from regraft.terminal.extras import needs

COLOURS = {"error": "red", "warning": "yellow", "info": "blue"}


def doctor(
    data: Data = None,
    fix: Annotated[bool, typer.Option("--fix", help="Repair what can be repaired safely.")] = False,
) -> None:
    """Find damaged or lost data and show how to repair it."""
    apply_options({"data": data})
    with needs("serve"):
        from service.doctor.examination import Doctor
        from service.store.database.connections import Database
        from service.store.database.migration import upgrade

    settings = checked_settings()
    with usable_database(settings):
        _check_database(settings.database_url)
        upgrade(settings)  # migrates nothing any more: warns of a later schema, and creates the folder of versions
        database = Database(settings.database_url)
        try:
            findings = Doctor(settings, database).examine(fix=fix)
        finally:
            database.close()
    answer(findings)
    for finding in findings:
        severity = Text(finding.severity, COLOURS[finding.severity])
        out.print(severity, f"{finding.code}: {finding.count} {finding.what}")
        out.print(f"  {', '.join(finding.examples)}{' ...' * (finding.count > len(finding.examples))}")
        out.print(f"  {f'repaired {finding.fixed}; ' * bool(finding.fixed)}{finding.advice}")
    if not findings:
        out.print("no problems found")
    if any(f.severity == "error" and f.fixed < f.count for f in findings):
        raise typer.Exit(1)


def _check_database(url: str) -> None:
    """Check that the database is Regraft's and not of an earlier release, and all of a SQLite file.

    Raises:
        UnusableDatabase: it is not; an examination must not migrate what an earlier release may still use.
        DatabaseDamaged: of a SQLite file.
    """
    from service.store.database.connections import is_sqlite, without_password
    from service.store.database.migration import revisions, schema_revision

    if is_sqlite(url):
        _check_file(url)
    revision, newest, shown = schema_revision(url), revisions()[-1], without_password(url)
    if revision is None:
        raise UnusableDatabase(f"{shown} has no Regraft tables: no service has run on it and no backup was restored")
    if revision < newest:
        why = f"{shown} is of an earlier release (migration {revision} of {newest})"
        raise UnusableDatabase(f"{why}: stop its processes and run `regraft migrate` first, or use its doctor")


def _check_file(url: str) -> None:
    """Check all of a SQLite file. Raises DatabaseDamaged, or UnusableDatabase if it does not exist."""
    from sqlalchemy import make_url

    from service.store.faults import check_sqlite, is_large, sqlite_file

    if (path := sqlite_file(url)) is None:
        raise UnusableDatabase(f"{make_url(url).database} does not exist; set --data to the service's folder")
    if is_large(path):
        err.print(f"checking {path.stat().st_size >> 20} MiB of {path}; this may take minutes")
    check_sqlite(url, thorough=True)
