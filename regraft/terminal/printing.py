"""Output for people that several commands have: tables, progress bars, warnings and measured scores."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table

from regraft.models import ImageWarning, ScoreInterval
from regraft.models.base import ApiModel
from regraft.terminal.answers import answer, err, out
from regraft.terminal.console import Description


def progress() -> Progress:
    """A progress bar on standard error."""
    columns = (Description(), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=err)


def print_table(columns: list[str], rows: list[list[Any]]) -> None:
    """Print rows under a header, if the columns have names.

    Long cells are folded on a terminal; elsewhere each row is one line, for programs.
    """
    table = Table(box=None, pad_edge=False, header_style="bold", show_header=any(columns))
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*("" if cell is None else str(cell) for cell in row))
    out.print(table)


def print_fields(found: Sequence[ApiModel], fields: list[str]) -> None:
    """Answer with models of one type, and print these fields of each as a row."""
    answer(found)
    print_table(fields, [[getattr(one, field) for field in fields] for one in found])


def would(dry_run: bool, done: str, infinitive: str) -> str:
    """The verb in the report of a change: done, or a dry run."""
    return f"would {infinitive}" if dry_run else done


def score(value: ScoreInterval) -> str:
    """A measured score in per cent with its interval."""
    return f"{value.value:.1%} [{value.low:.1%}, {value.high:.1%}]"


def print_warnings(warnings: Iterable[ImageWarning]) -> None:
    """Print warnings about the parts of images that a version does not see."""
    for warning in warnings:
        images = "1 image" if warning.count == 1 else f"{warning.count} images"
        err.print(f"warning: {images}: {warning.detail}")
