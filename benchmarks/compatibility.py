"""Every method on one data set over several seeds, as a table to compare with the papers' tables.

    python benchmarks/compatibility.py omniglot --root FOLDER --seeds 3 --out runs/omniglot

trains the versions that OUT/seed<N>/ lacks, one after the other, measures them, and writes the current table to
OUT/table.md. It can be stopped at any time; the same command continues.

    --set FIELD=VALUE        changes a recipe setting of all versions, as in `regraft train`
    --set PART.FIELD=VALUE   changes it for one, as fct.epochs=80
    --methods METHOD...      only these methods
    --table                  trains nothing and prints the table of what is there
    --write FILE             also writes the table into FILE, between `<!-- table FAMILY -->` and `<!-- end -->`;
                             rows of methods that OUT lacks stay
    --label TEXT             for a second table of a family, `<!-- table FAMILY TEXT -->`
    --picture FILE           draws the table of the document as SVG

training/comparison_table.py explains the columns.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from command_line import existing, refusals

from training.comparison import COMPARED_FAMILIES, compare_methods, parts_for, runs_of
from training.comparison_table import merge_table, read_pair_scores, table
from training.plots import as_svg, pairs_figure
from training.recipes.family import METHOD_PARTS


def main() -> None:
    arguments = parse()
    settings = [*([f"root={arguments.root}"] if arguments.root else []), *arguments.set]
    runs = runs_of(COMPARED_FAMILIES[arguments.family], arguments.out, arguments.seeds, settings)
    parts = parts_for(arguments.methods)

    def keep() -> None:
        (arguments.out / "table.md").write_text(table(runs, parts) + "\n")

    if not arguments.table:
        compare_methods(runs, parts, keep, lambda text: print(text, flush=True))
    found = table(runs, parts)
    print(found)
    if arguments.write:
        found = merge_table(arguments.write, f"{arguments.family} {arguments.label}".strip(), found)
    if arguments.picture:
        arguments.picture.write_bytes(as_svg(pairs_figure(read_pair_scores(found))))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=COMPARED_FAMILIES)
    parser.add_argument("--root", default="", help="the data set's folder")
    parser.add_argument("--out", type=Path, required=True, help="where versions and measurements go")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", nargs="+", choices=METHOD_PARTS, help="only these")
    parser.add_argument("--set", nargs="+", default=[], metavar="[PART.]FIELD=VALUE", help="for every recipe or one")
    parser.add_argument("--table", action="store_true", help="train nothing")
    parser.add_argument("--write", type=existing, metavar="FILE", help="put the table into a document")
    parser.add_argument("--label", default="", metavar="TEXT", help="of a second table of the family, as '30 epochs'")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the table as SVG")
    return parser.parse_args()


if __name__ == "__main__":
    with refusals():
        main()
