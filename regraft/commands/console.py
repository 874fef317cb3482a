"""The console of the commands: it shows data as it is, and lets none of it control the terminal.

Metadata, names and reasons come from anyone who may write to the service, and files may be called anything. Nothing in
them is markup, and every character that would move the cursor, hide text or turn its direction is shown as an escape.
"""

from __future__ import annotations

import unicodedata
from typing import Any

from rich.console import Console
from rich.progress import ProgressColumn, Task
from rich.text import Text

JOINERS = "\u200c\u200d"
"""Format characters that words and emoji are written with; they do nothing else."""
ACTING = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories: controls (C0 and C1), formats (bidirectional overrides), lone surrogates, line and paragraph."""

UNFOLDED = 100_000
"""The width of an output that is no terminal: nothing is folded there."""


def visible(text: str) -> str:
    r"""The text with every character that acts on a terminal written as Python would: an escape becomes `\x1b`."""
    return "".join(_escaped(c) if unicodedata.category(c) in ACTING and c not in JOINERS else c for c in text)


class PlainConsole(Console):
    """A console without markup, emoji codes and highlighting; a Text may still be coloured by whoever makes it."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, soft_wrap=True, stderr=stderr)
        if not self.is_terminal:
            self.width = UNFOLDED

    def render_str(self, text: str, **options: Any) -> Text:
        """Every string on its way out comes through here, also the cells of tables."""
        return super().render_str(visible(text), **options)


class Description(ProgressColumn):
    """The description of a progress bar; rich's own column would read it as markup."""

    def render(self, task: Task) -> Text:
        return Text(visible(task.description), no_wrap=True)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()
