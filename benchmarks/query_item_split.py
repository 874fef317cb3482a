"""Split the test images of an image folder into queries and items, so that a measurement costs less.

    python benchmarks/query_item_split.py ROOT OUT --queries 4 --items 8

makes OUT/train, OUT/query and OUT/gallery as links: all of ROOT/train, and of every class in ROOT/test the first images
by name for the queries and the next ones for the items.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="a folder with train/<class>/<image> and test/<class>/<image>")
    parser.add_argument("out", type=Path, help="the folder to make")
    parser.add_argument("--queries", type=int, required=True, help="of each class")
    parser.add_argument("--items", type=int, required=True, help="of each class")
    arguments = parser.parse_args()
    if missing := [part for part in ("train", "test") if not (arguments.root / part).is_dir()]:
        parser.error(f"root: {arguments.root} holds no folder {missing[0]}/")
    if arguments.out.exists():
        parser.error(f"out: {arguments.out} is there already")
    lay_out(arguments.root.resolve(), arguments.out, arguments.queries, arguments.items)


def lay_out(root: Path, out: Path, queries: int, items: int) -> None:
    """Link every training image, and each test class's first images as queries and next ones as items."""
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
    main()
