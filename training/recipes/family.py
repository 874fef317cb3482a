"""A family: an old and an independent recipe, and made of them a recipe for every method, changed in a field or two."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from training.recipes.recipe import Recipe

EXTRA = 32
"""Dimensions that OCA and BT2 add to the old ones, in the papers and here."""
CLIP = 1.0
CLIP_STEP = 0.2
"""Where HBCT's first version clips, and how much further out each later one does."""

MANY_CLASSES: dict[str, Mapping[str, Any]] = {
    "bct": {"options": {"logits": "cosine", "scale": 32.0}},
    "oca": {"options": {"logits": "cosine", "scale": 32.0}},
    "bt2": {"options": {"logits": "cosine", "logit_scale": 32.0}},
}
"""How methods that classify by old class means are set up for a hundred classes or more, where logits from -1 to 1 give
too flat a softmax: see docs/decisions/0033."""
MANY_CLASSES_SGD: dict[str, Mapping[str, Any]] = {
    "bct": {"options": {**MANY_CLASSES["bct"]["options"], "weight": 0.3}},
    "bt2": {"options": {**MANY_CLASSES["bt2"]["options"], "influence_weight": 0.3}},
    "advbct": {"options": {"weight": 1.0}},
    "contrast": {"options": {"weight": 1.0}},
    "hoc": {"options": {"weight": 1.0}},
}
"""Likewise for SGD, whose steps grow with the loss as Adam's do not: the default weight 10 over the scale, or training
diverges; AdvBCT's is its code's 1: with 10 it learns little else. The scale of `contrast` and HOC is 10, the inverse of
their temperature, and 10 and 9 times that is too much, too. OCA stays at its defaults: docs/decisions/0047."""

SIDE_VIEWS = {
    "flip": "small_crop_jitter",
    "crop_flip": "small_crop_jitter",
    "resized_crop_flip": "resized_crop_jitter",
}
"""What SimCLR sees, by the encoder's augmentation: its paper's, since two views that are no more than mirrored are one
image half of the time. Handwriting keeps its own."""

FIRSTS: dict[str, str] = {
    "v1": "the old version",
    "side_v1": "the old version with side-information, for FCT (SimCLR)",
    "independent": "the new version, compatible with nothing",
    "hyperbolic_v1": "the old version in hyperbolic space",
    "hyperbolic_independent": "the new version in hyperbolic space, compatible with nothing",
}
"""What is trained without an old version, and what it is."""
HOW: dict[str, str] = {
    "l2": "old classes are held in place (l2)",
    "lwf": "the old classifier is distilled (LwF)",
    "bct": "the old classifier reads new embeddings (BCT)",
    "contrast": "contrast with old embeddings (BT2's baseline)",
    "hot_refresh": "sharp contrast with old embeddings (Hot-Refresh)",
    "advbct": "a discriminator and elastic boundaries (AdvBCT)",
    "hoc": "contrast anchored in old embeddings (HOC)",
    "bt2": f"the old space, an independent one, {EXTRA} dimensions (BT2)",
    "oca": f"{EXTRA} more dimensions behind the old ones (OCA)",
    "fct": "old items move to the independent space (FCT)",
    "hbct": "inside the cones of a hyperbolic old version (HBCT)",
}
"""Every method that needs an old version, and what it does."""


@dataclass(frozen=True)
class Family:
    """Recipes on one data set.

    Args:
        name: what the names of its recipes begin with.
        title: what their summaries begin with.
        old: the first version.
        independent: the new version that is compatible with nothing.
        tuned: recipe, by what follows the family's name -> fields to change. Options are added to the others.
    """

    name: str
    title: str
    old: Recipe
    independent: Recipe
    tuned: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def recipes(self) -> dict[str, Callable[[], Recipe]]:
        """How to make each recipe, by name."""
        return {f"{self.name}_{part}": partial(self.recipe, part) for part in self.parts()}

    @staticmethod
    def parts() -> Iterator[str]:
        """What follows the family's name in the names of its recipes."""
        yield from (*FIRSTS, *HOW)

    def recipe(self, part: str) -> Recipe:
        """One recipe of the family."""
        base = self.old if part.endswith("v1") else self.independent
        changes = {**self._changes(part), **self.tuned.get(part, {})}
        options = {**self._changes(part).get("options", {}), **self.tuned.get(part, {}).get("options", {})}
        name = f"{self.name}_{part}"
        return replace(
            base, **{"name": name, "summary": f"{self.title}: {(FIRSTS | HOW)[part]}", **changes, "options": options}
        )

    def _changes(self, part: str) -> dict[str, Any]:
        if part in {"v1", "independent"}:
            return {}
        if part == "side_v1":
            return {"side": "simclr", "side_augment": SIDE_VIEWS.get(self.old.augment, "")}
        if part.startswith("hyperbolic"):
            return _hyperbolic(CLIP if part == "hyperbolic_v1" else CLIP + CLIP_STEP)
        if part == "hbct":
            return {**_hyperbolic(CLIP + CLIP_STEP), "old": f"{self.name}_hyperbolic_v1"}
        return {"method": part, "old": f"{self.name}_v1", **self._sizes(part)}

    def _sizes(self, part: str) -> dict[str, Any]:
        """What a method needs beside the old version."""
        independent = {"independent": f"{self.name}_independent"}
        if part == "oca":
            return {"dim": self.old.dim + EXTRA}
        if part == "bt2":
            return {**independent, "dim": self.old.dim + self.independent.dim, "options": {"extra": EXTRA}}
        if part == "fct":
            # The transform's own training; without augmentation every image has one old and one new embedding.
            return {**independent, **FORWARD, "old": f"{self.name}_side_v1"}
        return {}


FORWARD: dict[str, Any] = {
    "augment": "none",
    "cache_old": True,
    "optimiser": "adam",
    "rate": 5e-4,
    "weight_decay": 3.05e-5,
    "epochs": 80,
    "warmup_epochs": 5,
}
"""How FCT's transform is trained, whatever trains the backbone."""


def _hyperbolic(zeta: float) -> dict[str, Any]:
    return {"method": "hbct", "head": "lorentz_mlr", "space": "lorentz", "options": {"zeta": zeta}}
