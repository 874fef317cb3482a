"""Edges opened for an evaluation: those of serving, or the trained weights in torch where ONNX cannot run here.

Shape suffixes: N vectors, D dimension, S side-information.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Protocol

import torch
from torch import nn

from index.edges.transform import Transform, TransformedItems, load_forward, load_transform, normalise_or_zero
from index.errors import NoEncoder
from index.space import Vectors
from index.version import EDGE_MODEL, Edge, EdgeKind, Version
from training.evaluation.embeddings import VersionEmbeddings, has_onnxruntime
from training.export import UNEXPORTED_EDGES
from training.method import ItemEdge
from training.trained import WEIGHTS, Trained


class ItemTransform(Protocol):
    """An item edge."""

    def transform_items(self, x_ND: Vectors, side_NS: Vectors | None = None) -> TransformedItems:
        """Stored items of the old version -> the new version's space."""


def with_unexported_edges(version: Version) -> Version:
    """The version, also with the edges whose model is not exported yet; its weights in torch stand in for them.

    An edge fitted to the same old version meanwhile takes precedence, as it will when the models are exported.
    """
    exported = {edge.old for edge in version.edges}
    unexported = tuple(
        Edge(version.name, path.parent.name, EdgeKind(json.loads(path.read_text())["kind"]))
        for path in sorted((version.folder / UNEXPORTED_EDGES).glob("*/edge.json"))
        if path.parent.name not in exported
    )
    return replace(version, edges=version.edges + unexported)


def open_query_edge(edge: Edge, new: VersionEmbeddings, old: VersionEmbeddings) -> Transform:
    """Open an edge for queries.

    Raises:
        InvalidVersionFolder: it does not fit the two versions.
        NoEncoder: it has a model, and neither onnxruntime nor its weights are available.
    """
    if edge.kind in EDGE_MODEL and _needs_torch(edge):
        return _TorchEdge(edge, new, old)
    return load_transform(edge, new.version.card, old.version.card)


def open_forward(edge: Edge, new: VersionEmbeddings, old: VersionEmbeddings) -> ItemTransform:
    """Open an edge for items. Raises as `open_query_edge`."""
    if _needs_torch(edge):
        return _TorchForward(edge, new)
    return load_forward(edge, new.version.card, old.version.card)


def _needs_torch(edge: Edge) -> bool:
    return edge.folder is None or not has_onnxruntime()


class _TorchEdge:
    """A learned query edge run from the trained weights in torch; gives the same as its edge.onnx."""

    def __init__(self, edge: Edge, new: VersionEmbeddings, old: VersionEmbeddings) -> None:
        self.module, self.space = _trained_edge(edge, new.version), old.space

    def __call__(self, x_ND: Vectors, extra_NS: Vectors | None = None) -> Vectors:
        """(N, new dim) vectors -> (N, old dim) vectors."""
        with torch.inference_mode():
            return normalise_or_zero(self.space, self.module(torch.from_numpy(x_ND)).numpy())


class _TorchForward:
    """A learned item edge run from the trained weights in torch."""

    def __init__(self, edge: Edge, new: VersionEmbeddings) -> None:
        self.module, self.space = _trained_edge(edge, new.version), new.space

    def transform_items(self, x_ND: Vectors, side_NS: Vectors | None = None) -> TransformedItems:
        """As `index.edges.transform.Forward.transform_items`."""
        assert isinstance(self.module, ItemEdge)
        inputs = [torch.from_numpy(x) for x in (x_ND, side_NS) if x is not None]
        with torch.inference_mode():
            outputs = {name: output.numpy() for name, output in self.module.transform_items(*inputs).items()}
        variance_N1 = outputs.get("variance")
        moved_ND = normalise_or_zero(self.space, outputs["moved"])
        return TransformedItems(moved_ND, outputs.get("next_side"), None if variance_N1 is None else variance_N1[:, 0])


def _trained_edge(edge: Edge, new: Version) -> nn.Module:
    trained = Trained.load(new.folder) if WEIGHTS in new.card.files else None
    if trained is None or trained.edge is None or trained.edge_kind is not edge.kind:
        raise NoEncoder(f"the edge from {edge.new!r} to {edge.old!r} is an ONNX model, which requires onnxruntime")
    return trained.edge
