"""`regraft sweep`: choose the weights of a method on held-out training images. Needs the extra `train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regraft.terminal.answers import answer, out
from regraft.terminal.extras import needs
from regraft.terminal.printing import print_table
from regraft.terminal.stopping import stoppable


def sweep(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="Name of a recipe, or a .toml file.")],
    trials: Annotated[
        int, typer.Option("--trials", min=1, help="Number of trials, including the recipe's own weights.")
    ] = 8,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Change a field; may be repeated.")
    ] = None,
    size: Annotated[
        int | None,
        typer.Option("--size", min=1, max=4096, help="Input size of the encoder in pixels, for square images."),
    ] = None,
    target: Annotated[
        Path | None,
        typer.Option("--out", metavar="FOLDER", help="Folder for the trials' versions; default: runs/sweep-RECIPE."),
    ] = None,
    save: Annotated[
        Path | None, typer.Option("--save", metavar="FILE", help="Write the best recipe to this file.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace trials of other settings, images or old versions.")
    ] = False,
) -> None:
    """Search for a method's best weights on held-out training images.

    Example: regraft sweep digits_oca --trials 8 --save best.toml
    """
    with needs("train"), stoppable():
        from training.comparison.sweep import Trial
        from training.comparison.sweep import sweep as search
        from training.recipe_file import check_new_file, choose

        if save is not None:
            check_new_file(save)
        chosen = choose(recipe, settings or (), size)

        def say(trial: Trial) -> None:
            out.print(f"{trial.weights}: new/old {trial.new_old:.3f}, new/new {trial.new_new:.3f}")

        folder = target or Path("runs") / f"sweep-{chosen.recipe.name}"
        ranked = search(chosen.recipe, trials, folder, say, chosen.references, overwrite=overwrite, log=out.print)
        best = None if save is None else chosen.write(save, ranked[0].recipe)
        answer({"trials": [trial.as_json() for trial in ranked], "recipe": best})
        rows = [[t.weights, f"{t.new_old:.3f}", f"{t.new_new:.3f}", f"{t.old_old:.3f}"] for t in ranked]
        print_table(["weights", "new/old CMC-1", "new/new", "old/old"], rows)
        if best is not None:
            out.print(f"wrote {best}; `regraft train {save}` trains it")
