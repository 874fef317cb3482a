"""Evaluation: embeddings of a data set's two sides, M(new/new), M(old/old), M(new/old), and a report to print.

Shape suffixes: Q queries, N items, D dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from index.evaluation import MEAN_AP, Retrieval, negative_flips, paired_bootstrap, retrieval
from index.space import Vectors, space_from_json
from index.version import EdgeKind, Preprocess, Score
from training.data import Data, ImageSet, batches
from training.trained import Trained

METRICS = ("cmc@1", "cmc@5", MEAN_AP)


@dataclass(frozen=True)
class Report:
    """What a training measured on its query and gallery sets; `old_old` and `new_old` only beside an old version."""

    new_new: Retrieval
    old_old: Retrieval | None = None
    new_old: Retrieval | None = None

    def rows(self) -> Mapping[str, Retrieval]:
        """The measured pairs by name, as in the papers' tables."""
        named = {"old/old": self.old_old, "new/old": self.new_old, "new/new": self.new_new}
        return {name: measured for name, measured in named.items() if measured is not None}

    def lines(self) -> Iterator[str]:
        """The report as text."""
        yield f"{'':8}" + "".join(f"{metric:>24}" for metric in METRICS)
        for name, measured in self.rows().items():
            yield f"{name:8}" + "".join(f"{_interval(measured.interval(metric)):>24}" for metric in METRICS)
        for name, better, worse in (
            ("new/old - old/old", self.new_old, self.old_old),
            ("new/new - new/old", self.new_new, self.new_old),
        ):
            if better is not None and worse is not None:
                yield f"{name} on cmc@1: {_interval(gain(better, worse))}"
        if self.old_old is not None and self.new_old is not None:
            yield f"queries right before and wrong now: {negative_flips(self.old_old.hits[1], self.new_old.hits[1])}"


def scores(measured: Retrieval) -> dict[str, Score]:
    """The metrics of `METRICS` with their intervals."""
    return {metric: measured.interval(metric) for metric in METRICS}


def gain(better: Retrieval, worse: Retrieval, metric: str = "cmc@1") -> Score:
    """Paired bootstrap of a difference over the queries valid on both sides."""
    both = better.valid & worse.valid
    return paired_bootstrap(better.per_query(metric)[both], worse.per_query(metric)[both])


def measure(new: Trained, old: Trained | None, data: Data) -> Report:
    """Measure a trained version by itself, and against the old version through its edge."""
    new_QD, new_ND = both_sides(new, data)
    new_new = compare(new_QD, new_ND, data, new.recipe.space)
    if old is None:
        return Report(new_new)
    old_QD, old_ND = both_sides(old, data)
    old_old = compare(old_QD, old_ND, data, old.recipe.space)
    if new.edge_kind is None:
        return Report(new_new, old_old)
    space = new.recipe.space if new.edge_kind is EdgeKind.FORWARD else old.recipe.space
    sides = cross(new, new_QD, old_ND, embed_side(old, data.gallery))
    return Report(new_new, old_old, compare(*sides, data, space))


def cross(new: Trained, new_QD: Vectors, old_ND: Vectors, side_NS: Vectors | None = None) -> tuple[Vectors, Vectors]:
    """Queries and items as the version's edge lets them meet; the torch twin of `index.transform`."""
    if new.edge_kind is EdgeKind.TRUNCATE:
        first_QD = new_QD[:, : old_ND.shape[1]]
        return (F.normalize(torch.from_numpy(first_QD)).numpy() if new.recipe.space == "cosine" else first_QD), old_ND
    if new.edge is None:
        return new_QD, old_ND
    with torch.inference_mode():
        if new.edge_kind is EdgeKind.ONNX:
            return new.edge(torch.from_numpy(new_QD)).numpy(), old_ND
        side = () if side_NS is None else (torch.from_numpy(side_NS),)
        return new_QD, new.edge(torch.from_numpy(old_ND), *side).numpy()


def both_sides(trained: Trained, data: Data) -> tuple[Vectors, Vectors]:
    """Embeddings of the queries (Q, D) and of the items (N, D)."""
    items_ND = embed(trained, data.gallery)
    return items_ND if data.same else embed(trained, data.query), items_ND


def embed(trained: Trained, images: ImageSet) -> Vectors:
    """(N, dim) embeddings, ready to compare, of images seen through the version's own evaluation transform."""
    return np.ascontiguousarray(run_over(images, trained, trained.recipe.preprocess).numpy())


def embed_side(trained: Trained, images: ImageSet) -> Vectors | None:
    """(N, S) side-information of images, as `embed`; None where the version has none."""
    if trained.psi is None:
        return None
    return np.ascontiguousarray(run_over(images, trained.psi, trained.recipe.preprocess).numpy())


@torch.no_grad()
def run_over(images: ImageSet, module: nn.Module, spec: Preprocess, batch_size: int = 256) -> Tensor:
    """(N, D) float32 outputs of a module in eval mode, by a GPU where there is one; all of it ends on the CPU."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    module.eval().to(device)
    loader = batches(images, spec, batch_size)
    made_ND = torch.cat([module(image_BCHW.to(device)).float().cpu() for image_BCHW, _ in loader])
    module.cpu()
    return made_ND


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
