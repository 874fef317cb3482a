"""A trained version measured: its embeddings of queries and items, M(new/new), M(old/old), M(new/old), and a report.

Shape suffixes: Q queries, N items, D dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from index.evaluation.fitting import calibration_field
from index.evaluation.metrics import Compared, Retrieval, negative_flips, retrieval
from index.evaluation.relevance import LabelRelevance
from index.evaluation.scores import METRICS, compatibility, gain
from index.space import Vectors, space_from_json
from index.version import EdgeKind, Preprocess, Score
from training.data.images import Data, ImageSet, batches
from training.divergence import check_finite
from training.stored_embeddings import StoredVersion
from training.trained import Trained

HELD_OUT_PREFIX = "held-out "
"""With this begins the name of a score of held-out images in a training's logs."""


@dataclass(frozen=True)
class Report:
    """Results of a training on its query and gallery sets; all but `new_new` only with an old version.

    Attributes:
        calibration: the edge's `calibration` field, see `calibrate`.
    """

    new_new: Retrieval
    old_old: Retrieval | None = None
    new_old: Retrieval | None = None
    calibration: Mapping[str, Any] | None = None

    def rows(self) -> Mapping[str, Retrieval]:
        """The measured pairs by name, as in the papers' tables."""
        named = {"old/old": self.old_old, "new/old": self.new_old, "new/new": self.new_new}
        return {name: measured for name, measured in named.items() if measured is not None}

    def lines(self) -> Iterator[str]:
        """The report as text."""
        yield f"{'':8}" + "".join(f"{metric:>24}" for metric in METRICS)
        for name, measured in self.rows().items():
            yield f"{name:8}" + "".join(f"{_interval(measured.interval(metric)):>24}" for metric in METRICS)
        if self.old_old is not None and self.new_old is not None:
            difference = gain(self.new_old, self.old_old)
            yield f"new/old - old/old on cmc@1: {_interval(difference)}, {compatibility(difference)}"
            yield f"new/new - new/old on cmc@1: {_interval(gain(self.new_new, self.new_old))}"
            yield f"queries right before and wrong now: {negative_flips(self.old_old.hits[1], self.new_old.hits[1])}"


def measure(new: Trained, old: Trained | StoredVersion | None, data: Data) -> Report:
    """Measure a trained version by itself, and against the old version through its edge.

    Raises:
        Diverged: its embeddings are not finite.
    """
    new_QD, new_ND = embed_both(new, data)
    for embeddings in (new_QD, new_ND):
        check_finite(embeddings)
    new_new = compare(new_QD, new_ND, data, new.space)
    if old is None:
        return Report(new_new)
    old_QD, old_ND = embed_both(old, data)
    old_old = compare(old_QD, old_ND, data, old.space)
    if new.edge_kind is None:
        return Report(new_new, old_old)
    space = new.space if new.edge_kind is EdgeKind.FORWARD else old.space
    side_NS = embed_side(old, data.gallery)
    new_old = compare(*apply_trained_edge(new, new_QD, old_ND, side_NS), data, space)
    return Report(new_new, old_old, new_old, calibrate(new, new_ND, old_ND, side_NS, space, data))


def calibrate(
    new: Trained, new_ND: Vectors, old_ND: Vectors, side_NS: Vectors | None, space: str, data: Data
) -> dict[str, Any] | None:
    """Score maps of a trained edge and of the new version's own items; the form is `index.edges.calibration`'s.

    They are fitted on the gallery images alone, each as a query that leaves itself out: no encoder has seen these, and
    no query that is reported. (Training images would not do: the new encoder tells them apart as it does no others.)
    Where query and gallery are one list, that is the list. For a forward edge "edge" is for queries of the new version
    among items moved to its space.

    Args:
        new: the version with the edge.
        new_ND: the gallery by the new version.
        old_ND: the gallery by the old version.
        side_NS: the side-information that the old version stores with it.
        space: the one in which the edge compares queries and items.
        data: the data set; its gallery is used.

    Returns:
        {"edge": ..., "own": ..., "mode": ...}, see `index.query.edge_maps`; None where fewer than two gallery images
        have another one of their class.
    """
    codes = data.gallery.labels
    relevance = LabelRelevance(codes, codes, np.arange(len(codes)))
    rows = np.flatnonzero(relevance.valid)
    if len(rows) < 2:
        return None
    edge = Compared(*apply_trained_edge(new, new_ND, old_ND, side_NS), space_from_json({"kind": space}))
    own = Compared(new_ND, new_ND, space_from_json({"kind": new.space}))
    assert new.edge_kind is not None
    return calibration_field(new.edge_kind, edge, own, relevance, rows)


def apply_trained_edge(
    new: Trained, new_QD: Vectors, old_ND: Vectors, side_NS: Vectors | None = None
) -> tuple[Vectors, Vectors]:
    """Queries and items after the trained version's edge, in one space."""
    assert new.edge_kind is not None
    return apply_edge(new.edge_kind, new.edge, new.space, new_QD, old_ND, side_NS)


@torch.no_grad()
def apply_edge(
    kind: EdgeKind,
    edge: nn.Module | None,
    space: str,
    new_QD: Vectors,
    old_ND: Vectors,
    side_NS: Vectors | None = None,
) -> tuple[Vectors, Vectors]:
    """Queries and items after an edge, in one space; the counterpart of `index.edges.transform` in torch."""
    if kind is EdgeKind.TRUNCATE:
        first_QD = new_QD[:, : old_ND.shape[1]]
        return (F.normalize(torch.from_numpy(first_QD)).numpy() if space == "cosine" else first_QD), old_ND
    if edge is None:
        return new_QD, old_ND
    device = next((p.device for p in edge.parameters()), torch.device("cpu"))
    if kind is EdgeKind.ONNX:
        return edge(torch.from_numpy(new_QD).to(device)).cpu().numpy(), old_ND
    side = () if side_NS is None else (torch.from_numpy(side_NS).to(device),)
    return new_QD, edge(torch.from_numpy(old_ND).to(device), *side).cpu().numpy()


def embed_both(version: Trained | StoredVersion, data: Data) -> tuple[Vectors, Vectors]:
    """Embeddings of the queries (Q, D) and of the items (N, D)."""
    items_ND = embed(version, data.gallery)
    return items_ND if data.same else embed(version, data.query), items_ND


def embed(version: Trained | StoredVersion, images: ImageSet) -> Vectors:
    """(N, dim) embeddings, ready to compare, of images seen through the version's own evaluation transform."""
    if isinstance(version, StoredVersion):
        return version.embed(images)
    return np.ascontiguousarray(run_over(images, version, version.recipe.preprocess).numpy())


def embed_side(version: Trained | StoredVersion, images: ImageSet) -> Vectors | None:
    """(N, S) side-information of images, as `embed`; None where the version has none."""
    if isinstance(version, StoredVersion) or version.psi is None:
        return None
    return np.ascontiguousarray(run_over(images, version.psi, version.recipe.preprocess).numpy())


@torch.no_grad()
def run_over(images: ImageSet, module: nn.Module, spec: Preprocess, batch_size: int = 256) -> Tensor:
    """(N, D) float32 outputs of a module in eval mode, on a GPU if there is one; module and outputs end on the CPU."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    module.eval().to(device)
    loader = batches(images, spec, batch_size)
    embeddings_ND = torch.cat([module(image_BCHW.to(device)).float().cpu() for image_BCHW, _ in loader])
    module.cpu()
    return embeddings_ND


def compare(queries_QD: Vectors, items_ND: Vectors, data: Data, space: str) -> Retrieval:
    """Retrieval from the data's query images in its gallery images; each leaves itself out where they are the same."""
    remove_self = np.arange(len(queries_QD)) if data.same else None
    return retrieval(
        queries_QD,
        data.query.labels,
        items_ND,
        data.gallery.labels,
        space_from_json({"kind": space}),
        remove_self=remove_self,
    )


def _interval(score: Score) -> str:
    return f"{score.value:.3f} ({score.low:.3f} - {score.high:.3f})"
