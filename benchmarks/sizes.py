"""Print the length of every module and the lengths of functions; exit 1 if a module has more than 400 lines.

A function's length does not count its docstring, as in published figures of other code bases.
"""

from __future__ import annotations

import ast
import statistics
import sys
from pathlib import Path

PACKAGES = ("regraft", "service", "training", "index", "migrations", "examples")
MAX_LINES = 400
ROOT = Path(__file__).parent.parent


def main() -> int:
    """Print one line a package and one a module; return the exit code."""
    too_long = []
    for package in PACKAGES:
        modules = {path: len(path.read_text().splitlines()) for path in sorted((ROOT / package).rglob("*.py"))}
        functions = sorted(length for path in modules for length in function_lengths(path.read_text()))
        print(f"{package}: {sum(modules.values())} lines, functions {spread(functions)}")
        for path, lines in modules.items():
            print(f"  {lines:4} {path.relative_to(ROOT)}")
        too_long += [path for path, lines in modules.items() if lines > MAX_LINES]
    for path in too_long:
        print(f"{path.relative_to(ROOT)} has more than {MAX_LINES} lines", file=sys.stderr)
    return 1 if too_long else 0


def function_lengths(source: str) -> list[int]:
    """Lines of every function in a module, docstrings left out."""
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return [node.end_lineno - node.lineno + 1 - docstring_lines(node) for node in functions if node.end_lineno]


def docstring_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines the docstring takes."""
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is None or first.end_lineno is None:
        return 0
    return first.end_lineno - first.lineno + 1


def spread(lengths: list[int]) -> str:
    """Median and 90th percentile."""
    if not lengths:
        return "none"
    return f"median {statistics.median(lengths):g}, 90 % up to {lengths[int(0.9 * (len(lengths) - 1))]}"


if __name__ == "__main__":
    sys.exit(main())
