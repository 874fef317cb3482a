"""The console of the commands: prints untrusted data literally, so that it cannot control the terminal.

Metadata, names and reasons come from everyone who may write to the service, and files may have any names. They are
never read as markup, and characters that move the cursor, hide text or change its direction are printed as escapes.
"""

from __future__ import annotations

import unicodedata
from typing import Any

from rich.console import Console
from rich.progress import ProgressColumn, Task
from rich.text import Text

JOINERS = "\u200c\u200d"
"""Format characters that are parts of words and emoji, and have no other effect."""
ACTING = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories: controls (C0 and C1), formats (bidirectional overrides), lone surrogates, line and paragraph."""

UNFOLDED = 100_000
"""The width of an output that is not a terminal, so that lines are not folded."""


def visible(text: str) -> str:
    r"""The text with every character that acts on a terminal written as Python would: an escape becomes `\x1b`."""
    return "".join(_escaped(c) if unicodedata.category(c) in ACTING and c not in JOINERS else c for c in text)


class PlainConsole(Console):
    """A console without markup, emoji codes and highlighting; a `Text` may still have styles."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, soft_wrap=True, stderr=stderr)
        if not self.is_terminal:
            self.width = UNFOLDED

    def render_str(self, text: str, **options: Any) -> Text:
        """Overrides rich's method, through which all printed strings pass, including cells of tables."""
        return super().render_str(visible(text), **options)


class Description(ProgressColumn):
    """The description column of a progress bar; rich's own would read it as markup."""

    def render(self, task: Task) -> Text:
        return Text(visible(task.description), no_wrap=True)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()
