"""Split the test images of an image folder into queries and items, so that a measurement costs less.

    python benchmarks/query_item_split.py ROOT OUT --queries 4 --items 8

makes OUT/train, OUT/query and OUT/gallery as links: all of ROOT/train, and of every class in ROOT/test the first images
by name for the queries and the next ones for the items.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from command_line import run_main


def main(
    root: Annotated[Path, typer.Argument(help="Folder with train/<class>/<image> and test/<class>/<image>.")],
    out: Annotated[Path, typer.Argument(help="Folder to make.")],
    queries: Annotated[int, typer.Option(min=1, help="Of each class.")],
    items: Annotated[int, typer.Option(min=1, help="Of each class.")],
) -> None:
    if missing := [part for part in ("train", "test") if not (root / part).is_dir()]:
        raise typer.BadParameter(f"{root} holds no folder {missing[0]}/", param_hint="root")
    if out.exists():
        raise typer.BadParameter(f"{out} is there already", param_hint="out")
    root = root.resolve()
    for folder in classes(root / "train"):
        link(images(folder), out / "train" / folder.name)
    for folder in classes(root / "test"):
        found = images(folder)
        link(found[:queries], out / "query" / folder.name)
        link(found[queries : queries + items], out / "gallery" / folder.name)


def classes(part: Path) -> list[Path]:
    """The folders of a part's classes."""
    return sorted(path for path in part.iterdir() if path.is_dir())


def images(folder: Path) -> list[Path]:
    """A class's files by name."""
    return sorted(path for path in folder.iterdir() if path.is_file())


def link(paths: Sequence[Path], folder: Path) -> None:
    """Links to files, in a folder of their own."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in paths:
        (folder / path.name).symlink_to(path)


if __name__ == "__main__":
    run_main(main)
