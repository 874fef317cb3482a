"""A family: the recipes of every method on one data set, derived from an old and an independent recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from training.recipes.recipe import Recipe

EXTRA = 32
"""Dimensions that OCA and BT2 add to the old ones, in the papers and here."""
ZETA = 1.0
ZETA_STEP = 0.2
"""The norm at which HBCT's first version clips, and how much larger it is in each later one."""

LONG_HEADS: dict[str, Mapping[str, Any]] = {
    part: {"options": {"head_start": "adacos"}} for part in ("hyperbolic_v1", "hyperbolic_independent")
}
"""Settings of hyperbolic versions without an old one, for a hundred classes or more: see docs/decisions/0059."""
MANY_CLASSES: dict[str, Mapping[str, Any]] = {
    **LONG_HEADS,
    "bct": {"options": {"logits": "cosine", "scale": 32.0}},
    "oca": {"options": {"logits": "cosine", "scale": 32.0}},
    "bt2": {"options": {"logits": "cosine", "logit_scale": 32.0}},
}
"""Likewise, and of methods that classify by old class means, where logits from -1 to 1 give too flat a softmax: see
docs/decisions/0033."""
MANY_CLASSES_SGD: dict[str, Mapping[str, Any]] = {
    **LONG_HEADS,
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
"""The encoder's augmentation -> SimCLR's, as in its paper: two views of an image that is only mirrored are equal half
of the time. Other augmentations, those of handwriting, serve both."""

STANDALONE_PARTS: dict[str, str] = {
    "v1": "the old version",
    "side_v1": "the old version with side-information, for FCT (SimCLR)",
    "independent": "the new version, compatible with nothing",
    "hyperbolic_v1": "the old version in hyperbolic space",
    "hyperbolic_independent": "the new version in hyperbolic space, compatible with nothing",
}
"""Part -> summary, of versions that are trained without an old one."""
METHOD_PARTS: dict[str, str] = {
    "l2": "embeddings are held in place (l2)",
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
"""Part -> summary, of versions that a method makes compatible with an old one; parts are the methods' names."""


@dataclass(frozen=True)
class Family:
    """Recipes on one data set, named <family>_<part>.

    Args:
        name: of the family.
        title: what the summaries of its recipes begin with.
        old: the first version.
        independent: the new version that is compatible with nothing.
        tuned: part -> fields to change. Options are added to the others.
    """

    name: str
    title: str
    old: Recipe
    independent: Recipe
    tuned: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def recipes(self) -> dict[str, Callable[[], Recipe]]:
        """Name -> the function that returns the recipe."""
        return {f"{self.name}_{part}": partial(self.recipe, part) for part in self.parts()}

    @staticmethod
    def parts() -> Iterator[str]:
        """The parts that every family has."""
        yield from (*STANDALONE_PARTS, *METHOD_PARTS)

    def recipe(self, part: str) -> Recipe:
        """The recipe of one part."""
        base = self.old if part.endswith("v1") else self.independent
        summary = f"{self.title}: {(STANDALONE_PARTS | METHOD_PARTS)[part]}"
        changes, tuned = self._changes(part), self.tuned.get(part, {})
        options = {**changes.get("options", {}), **tuned.get("options", {})}
        named = {"name": f"{self.name}_{part}", "summary": summary}
        return replace(base, **{**named, **changes, **tuned, "options": options})

    def _changes(self, part: str) -> dict[str, Any]:
        if part in {"v1", "independent"}:
            return {}
        if part == "side_v1":
            return {"side": "simclr", "side_augment": SIDE_VIEWS.get(self.old.augment, "")}
        if part.startswith("hyperbolic"):
            return _hyperbolic(ZETA if part == "hyperbolic_v1" else ZETA + ZETA_STEP)
        if part == "hbct":
            return {**_hyperbolic(ZETA + ZETA_STEP), "old": f"{self.name}_hyperbolic_v1"}
        return {"method": part, "old": f"{self.name}_v1", **self._sizes(part)}

    def _sizes(self, part: str) -> dict[str, Any]:
        """The sizes and references that a method needs beside the old version."""
        independent = {"independent": f"{self.name}_independent"}
        if part == "oca":
            return {"dim": self.old.dim + EXTRA}
        if part == "bt2":
            return {**independent, "dim": self.old.dim + self.independent.dim, "options": {"extra": EXTRA}}
        if part == "fct":
            # The transform's own training; without augmentation every image has one old and one new embedding.
            return {**independent, **FCT_TRAINING, "old": f"{self.name}_side_v1"}
        return {}


FCT_TRAINING: dict[str, Any] = {
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
