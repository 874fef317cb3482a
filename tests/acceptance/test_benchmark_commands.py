"""Each documented command of a benchmark has options and arguments that the benchmark takes.

The parameters of its `main` are read from its source: importing all benchmarks, and torch, would take long.
"""

from __future__ import annotations

import ast
import math
import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SCRIPTS = ROOT / "benchmarks"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md"), *SCRIPTS.glob("*.py")]
COMMAND = re.compile(r"python benchmarks/(\w+)\.py((?:[^`\n]|\n(?=\S))*)")
DOCUMENTED = {command for page in PAGES for command in COMMAND.findall(page.read_text())}
ALIAS = re.compile(r"^(\w+) = (Annotated(?:.|\n[ \]])*)", re.MULTILINE)
ALIASES = dict(ALIAS.findall((SCRIPTS / "command_line.py").read_text()))


def taken(script: str) -> tuple[dict[str, bool], set[str], float, float]:
    """Whether each option takes a value; options that are required; the least and the most arguments."""
    body = ast.parse((SCRIPTS / f"{script}.py").read_text()).body
    (main,) = [node.args for node in body if isinstance(node, ast.FunctionDef) and node.name == "main"]
    options, needed, least, most = {"--help": False}, set(), 0, 0.0
    for number, parameter in enumerate(main.args):
        kind = ast.unparse(parameter.annotation or ast.Constant(None))
        kind = ALIASES.get(kind, kind)
        required = number < len(main.args) - len(main.defaults)
        if "typer.Argument" in kind or (required and "typer.Option" not in kind):
            least += required
            most += math.inf if "list[" in kind else 1
        else:
            named = re.search(r"[\"'](--[a-z-]+)", kind)
            option = named[1] if named else f"--{parameter.arg.replace('_', '-')}"
            options[option] = "bool" not in kind
            needed |= {option} if required else set()
    return options, needed, least, most


@pytest.mark.parametrize(("script", "words"), sorted(DOCUMENTED))
def test_a_documented_benchmark_takes_the_options_and_arguments_that_it_is_called_with(script, words):
    options, needed, least, most = taken(script)
    rest, named, arguments = iter(shlex.split(words, comments=True)), set(), 0
    for word in rest:
        if word.startswith("--"):
            assert word in options
            named.add(word)
            assert not options[word] or next(rest, None)
        else:
            arguments += 1

    assert "--help" in named or (needed <= named and least <= arguments <= most)
