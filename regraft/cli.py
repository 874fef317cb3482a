"""The `regraft` command. Each command imports its dependencies when it runs, so most need neither torch nor SQL."""

from __future__ import annotations

import sys
from io import TextIOWrapper

import typer

from index.errors import RegraftError
from regraft import __version__
from regraft.commands import (
    audit,
    backfills,
    doctor,
    edges,
    evaluations,
    galleries,
    ingest,
    items,
    keys,
    plan,
    processes,
    query,
    recipes,
    reproduce,
    sweep,
    train,
    transfer,
    upgrades,
    versions,
)
from regraft.terminal.answers import err, json_requested, run
from regraft.terminal.command import Commands

app = Commands(
    name="regraft",
    help="A retrieval service whose gallery outlives its embedding model.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

SERVICE, GALLERY, UPGRADE, TRAINING = "Service", "Galleries", "Upgrades", "Training"

app.command(rich_help_panel=SERVICE)(processes.serve)
app.command(rich_help_panel=SERVICE)(processes.worker)
app.command(rich_help_panel=SERVICE)(processes.migrate)
app.command(rich_help_panel=SERVICE)(doctor.doctor)
app.add_typer(keys.key, name="key", rich_help_panel=SERVICE)
app.command(rich_help_panel=SERVICE)(audit.audit)
app.add_typer(galleries.gallery, name="gallery", rich_help_panel=GALLERY)
app.command(rich_help_panel=GALLERY)(ingest.ingest)
app.command("import", rich_help_panel=GALLERY)(transfer.import_)
app.command(rich_help_panel=GALLERY)(query.query)
app.add_typer(items.item, name="item", rich_help_panel=GALLERY)
app.add_typer(versions.version, name="version", rich_help_panel=UPGRADE)
app.add_typer(evaluations.evaluation, name="evaluation", rich_help_panel=UPGRADE)
app.add_typer(edges.edge, name="edge", rich_help_panel=UPGRADE)
app.command(rich_help_panel=UPGRADE)(upgrades.gate)
app.command(rich_help_panel=UPGRADE)(upgrades.deploy)
app.add_typer(upgrades.deployment, name="deployment", rich_help_panel=UPGRADE)
app.command(rich_help_panel=UPGRADE)(upgrades.rollback)
app.command(rich_help_panel=UPGRADE)(upgrades.retire)
app.add_typer(backfills.backfill, name="backfill", rich_help_panel=UPGRADE)
app.command(rich_help_panel=UPGRADE)(plan.plan)
app.command(rich_help_panel=TRAINING)(train.train)
app.command(rich_help_panel=TRAINING)(recipes.recipes)
app.command(rich_help_panel=TRAINING)(train.evaluate)
app.command("fit-edge", rich_help_panel=TRAINING)(train.fit_edge)
app.command(rich_help_panel=TRAINING)(train.export)
app.command(rich_help_panel=TRAINING)(sweep.sweep)
app.command(rich_help_panel=TRAINING)(reproduce.reproduce)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Show the version and exit."
    ),
) -> None:
    pass


def main() -> None:
    """Run the command; an error that a user can cause is one line on standard error and exit code 1."""
    if isinstance(sys.stdout, TextIOWrapper):
        # As on standard error, escape characters that the encoding lacks, such as Latin-1.
        sys.stdout.reconfigure(errors="backslashreplace")
    if json_requested(sys.argv[1:]):
        sys.exit(run(app))
    try:
        app()
    except (RegraftError, OSError) as error:
        err.print(f"regraft: {' '.join(str(error).split())}", style="red")
        sys.exit(1)
