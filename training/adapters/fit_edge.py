"""Fit an edge between two existing versions on pairs of their embeddings, measure it, write it into the newer folder.

The measured edge is the served one: it is read back from its files. Shape suffixes as in `training.adapters.pairs`.
"""

from __future__ import annotations

import math
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from index.edges.transform import load_transform
from index.errors import InvalidArgument
from index.evaluation.adapter_choice import (
    AUTO,
    ChosenKind,
    Fit,
    Search,
    choose_kind,
    learning_curve,
    recommendation,
    serving_map,
)
from index.evaluation.adapters import Affine, SlerpAdapter, few_pairs_warning
from index.evaluation.fitting import FITS, Pairs, fit_adapter, fit_calibration_maps, legal_options, measure
from index.evaluation.metrics import Retrieval
from index.evaluation.scores import gain, scores
from index.space import Cosine, space_from_json
from index.version import EDGE_MODEL, Card, Edge, EdgeKind, Version
from index.version_folder.folder import load_version, write_card, write_edge
from index.version_folder.new_folder import new_folder
from training.adapters.residual_mlp import FewPairsWarning, ResidualMlp, residual_mlp
from training.evaluation.cross_version import oldest_first
from training.evaluation.embeddings import has_onnxruntime
from training.evaluation.tables import interval
from training.export import PARITY_IMAGES, can_export, write_model
from training.overrides import converted
from training.recipe_checks import check_number

Adapter = Affine | ResidualMlp | SlerpAdapter
MLP_LIMITS: Mapping[str, tuple[float, float]] = {
    "hidden": (1, math.inf),
    "epochs": (0, math.inf),
    "rate": (0, math.inf),
    "batch_size": (1, math.inf),
    "seed": (0, 2**31 - 1),
}
"""Setting of a residual MLP -> its least and greatest value."""


@dataclass(frozen=True)
class Fitted:
    """The edge as written, and M(new/old) beside M(old/old) on the same queries (None without labels).

    `choice` holds what each kind reached, with kind `auto`; `advice` is the conclusion, in sentences.
    """

    edge: Edge
    new_old: Retrieval
    old_old: Retrieval | None
    choice: ChosenKind | None = None
    advice: tuple[str, ...] = ()

    @property
    def queries(self) -> int:
        """The number of queries that the scores are means of: those with an item to find."""
        return int(self.new_old.valid.sum())

    def as_json(self) -> dict[str, Any]:
        """The result as JSON values; `gain` is new/old - old/old on cmc@1, null without labels."""
        edge = self.edge
        known = None if self.old_old is None else vars(gain(self.new_old, self.old_old))
        return {
            "new": edge.new,
            "old": edge.old,
            "kind": edge.kind.value,
            "support": edge.support,
            "gain": known,
            "scores": {metric: vars(score) for metric, score in edge.scores.items()},
            "queries": self.queries,
            **({} if self.choice is None else self.choice.as_json()),
            "advice": list(self.advice),
        }

    def lines(self) -> Iterator[str]:
        """The result as text."""
        edge = self.edge
        fitted = f"fitted on {edge.support} pairs" if edge.support else "fitted on nothing"
        yield f"{edge.new} -> {edge.old}: {edge.kind.value}, {fitted}, measured with {self.queries} queries"
        yield from (f"new/old {metric}: {interval(score)}" for metric, score in edge.scores.items())
        if self.old_old is not None:
            yield f"new/old - old/old on cmc@1: {interval(gain(self.new_old, self.old_old))}"
        if self.choice is not None:
            for kind, reached in self.choice.reached.items():
                yield f"tried {kind}: cmc@1 {interval(reached.interval('cmc@1'))} on held-out pairs"
            yield from (f"left out {kind}: {why}" for kind, why in self.choice.left_out.items())
        yield from self.advice


def fit_edge(
    old: Version,
    new: Version,
    pairs: Pairs,
    kind: str,
    options: Mapping[str, float] | None = None,
    *,
    overwrite: bool = False,
) -> Fitted:
    """Fit an edge from `new` to `old`, measure it, and write it into the folder of `new`.

    The folder is copied, changed and renamed into its place, so that it is never seen half written.

    Args:
        old: the older version.
        new: the newer one; its folder changes.
        pairs: from `read_pairs` or `embed_pairs`.
        kind: one of `KINDS`, or `auto`: the best of those that fit something, chosen on a part of the pairs to fit on.
        options: of the adapter, see `read_options`.
        overwrite: replace an existing edge to `old`.

    Raises:
        InvalidArgument: the versions, the kind or the options cannot be used.
        InvalidVersionFolder: the kind does not fit the two versions.
    """
    check_fit(old, new, kind, overwrite)
    with new_folder(new.folder) as folder:
        shutil.copytree(new.folder, folder, dirs_exist_ok=True)
        edge_folder = folder / "edges" / old.name
        shutil.rmtree(edge_folder, ignore_errors=True)
        edge_folder.mkdir(parents=True)
        search = fits_of(new.card, old.card, options or {})
        choice = choose_kind(ADAPTER_OF, search, pairs, old.card) if kind == AUTO else None
        kind = choice.kind if choice else kind
        adapter = KINDS[kind](pairs, new.card, old.card, options or {})
        if adapter is not None and (few := few_pairs_warning(len(pairs.new_SM))):
            warnings.warn(few, FewPairsWarning, stacklevel=2)
        edge = _save(adapter, Edge(new.name, old.name, EdgeKind.ZERO_PAD, folder=edge_folder), pairs)
        queries_QN = load_transform(edge, new.card, old.card)(pairs.new_QM, pairs.old_QN)
        new_old = measure(queries_QN, pairs, old.card)
        calibration = fit_calibration_maps(edge.kind, queries_QN, pairs, new.card, old.card) if pairs.labelled else None
        edge = replace(
            edge,
            scores=scores(new_old),
            old_encoder=old.card.encoder,
            calibration=calibration,
        )
        write_edge(folder, edge)
        write_card(folder, new.card)
        load_version(folder)
    old_old = measure(pairs.old_QN, pairs, old.card) if pairs.labelled else None
    if adapter is None:
        return Fitted(edge, new_old, old_old)
    curve = learning_curve(kind, search, pairs, old.card, new_old)
    chosen = (choice.in_words(),) if choice else ()
    advice = (*chosen, curve.in_words(), recommendation(kind, new_old, old_old))
    return Fitted(edge, new_old, old_old, choice, advice)


def read_options(kind: str, settings: Sequence[str]) -> dict[str, float]:
    """Read `name=value` settings of an adapter.

    Raises:
        InvalidArgument: an unknown kind or name (lists the legal ones), or a value of the wrong type.
    """
    _check_kind(kind)
    legal = legal_options(ADAPTER_OF.get(kind))
    options = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or name not in legal:
            known = ", ".join(f"{key}={default}" for key, default in legal.items()) or "none"
            raise InvalidArgument(f"{setting!r} is not a setting of kind {kind}; legal: {known}", pointer="/set")
        options[name] = converted(name, value, type(legal[name]).__name__)
    return options


def _fitted(kind: str) -> Callable[..., Adapter]:
    return lambda pairs, new, old, options: fit_adapter(kind, pairs, new, old, options)


def _mlp(pairs: Pairs, _: Card, old: Card, options: Mapping[str, Any]) -> ResidualMlp:
    if not (can_export() and has_onnxruntime()):
        raise InvalidArgument("kind mlp requires the packages onnx, onnxscript and onnxruntime", pointer="/kind")
    for name, number in options.items():
        check_number(name, number, MLP_LIMITS[name])
    unit = space_from_json(old.space) == Cosine()
    return residual_mlp(pairs.new_SM, pairs.old_SN, unit=unit, **options)


ADAPTER_OF: dict[str, Callable[..., Adapter]] = {**FITS, "mlp": residual_mlp}
"""kind -> adapter, of the kinds that are fitted; its keyword arguments that are numbers are the settings."""

KINDS: dict[str, Callable[[Pairs, Card, Card, Mapping[str, float]], Adapter | None]] = {
    **{kind: _fitted(kind) for kind in FITS},
    "mlp": _mlp,
    "zero_pad": lambda *_: None,
}
"""kind -> (pairs, new card, old card, options) -> adapter; None where nothing is fitted."""


def fits_of(new: Card, old: Card, options: Mapping[str, float]) -> Fit:
    """A function that fits a kind on pairs, and returns how its adapter maps queries."""

    def search(kind: str, pairs: Pairs) -> Search:
        adapter = KINDS[kind](pairs, new, old, options)
        assert adapter is not None
        if isinstance(adapter, ResidualMlp):
            return lambda new_QM, _: np.asarray(adapter(torch.from_numpy(new_QM)))
        return serving_map(adapter, old)

    return search


def _check_kind(kind: str) -> None:
    if kind not in (*KINDS, AUTO):
        raise InvalidArgument(f"kind must be one of {', '.join((*KINDS, AUTO))}, not {kind!r}", pointer="/kind")


def check_fit(old: Version, new: Version, kind: str, overwrite: bool) -> None:
    """Refuse what `fit_edge` would, before images are embedded for it.

    Raises:
        InvalidArgument: the versions or the kind cannot be used, or there is an edge that is not to be replaced.
    """
    _check_kind(kind)
    if old.name == new.name:
        raise InvalidArgument(f"both versions are named {old.name!r}", pointer="/new")
    oldest_first({old.name: old, new.name: replace(new, edges=(Edge(new.name, old.name, EdgeKind.IDENTITY),))})
    existing = next((edge for edge in new.edges if edge.old == old.name), None)
    if existing is not None and not overwrite:
        raise InvalidArgument(
            f"{new.name!r} already has an edge to {old.name!r}, of kind {existing.kind.value}; --overwrite replaces it",
            pointer="/overwrite",
        )


def _save(adapter: Adapter | None, edge: Edge, pairs: Pairs) -> Edge:
    """Write the adapter's files; the edge with its kind and support."""
    assert edge.folder is not None
    if adapter is None:
        return edge
    if isinstance(adapter, ResidualMlp):
        inputs = {"embedding": torch.from_numpy(pairs.new_SM[:PARITY_IMAGES])}
        write_model(edge.folder / EDGE_MODEL[adapter.kind], adapter, inputs, ["old_embedding"])
    else:
        adapter.save(edge.folder)
    return replace(edge, kind=adapter.kind, support=len(pairs.new_SM))
