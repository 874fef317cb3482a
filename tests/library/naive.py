"""Naive versions of the computations, written from their definitions in float64, and random vectors. No torch.

Shape suffixes as in `index`: Q queries, N items.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from index.space import Cosine, Euclidean, Lorentz, Space
from index.version import Card, Edge, EdgeKind


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    """Normal numbers, float32."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def unit(x: np.ndarray) -> np.ndarray:
    """Rows normalised to length 1, in their own precision."""
    rows: np.ndarray = x / np.linalg.norm(x, axis=1, keepdims=True)
    return rows


def units(rows: int, dim: int, seed: int = 0) -> np.ndarray:
    """Random unit vectors, float32."""
    return unit(draw(rows, dim, seed=seed))


def rotation(dim: int, seed: int = 0) -> np.ndarray:
    """A random orthogonal matrix, float32."""
    return np.linalg.qr(draw(dim, dim, seed=seed))[0].astype(np.float32)


def mean_square(adapter: Callable[[np.ndarray], np.ndarray], new: np.ndarray, old: np.ndarray) -> float:
    """Mean squared error of an adapter on pairs."""
    return float(np.mean((adapter(new) - old) ** 2))


def scores(queries: np.ndarray, items: np.ndarray, space: Space) -> np.ndarray:
    """Scores (Q, N) by the definition of the space."""
    q, x = queries.astype(np.float64)[:, None], items.astype(np.float64)[None]
    score: np.ndarray
    if isinstance(space, Cosine):
        score = (q * x).sum(-1)
    elif isinstance(space, Euclidean):
        score = np.sqrt(((q - x) ** 2).sum(-1))
    else:
        assert isinstance(space, Lorentz)
        time_q, time_x = (np.sqrt(1 / space.curvature + (v**2).sum(-1)) for v in (q, x))
        score = np.arccosh(np.maximum(space.curvature * (time_q * time_x - (q * x).sum(-1)), 1)) / space.curvature**0.5
    return score


def costs(queries: np.ndarray, items: np.ndarray, space: Space) -> np.ndarray:
    """`scores` (Q, N) with the sign for which lower is better."""
    table = scores(queries, items, space)
    return -table if space.higher_is_better else table


def retrieval(
    cost: np.ndarray, query_labels: Sequence[Any], item_labels: Sequence[Any], removed: Sequence[int], ks: Sequence[int]
) -> list[tuple[dict[int, bool], float] | None]:
    """Per query (hits at each k, average precision), or None without a relevant item, from a sorted list."""
    answers: list[tuple[dict[int, bool], float] | None] = []
    for query, label in enumerate(query_labels):
        ranked = sorted((c, j) for j, c in enumerate(cost[query]) if j != removed[query])
        right = [item_labels[j] == label for _, j in ranked]
        precisions = [sum(right[: r + 1]) / (r + 1) for r in range(len(right)) if right[r]]
        hits = {k: any(right[:k]) for k in ks}
        answers.append((hits, sum(precisions) / len(precisions)) if precisions else None)
    return answers


def threshold(genuine: Sequence[float], impostor: Sequence[float], far: float) -> float:
    """The lowest threshold t for which at most the share `far` of impostors passes (`score >= t`), by trying all."""
    below = np.array(impostor)
    return min(t for t in [*genuine, *impostor, np.inf] if np.mean(below >= t) <= far + 1e-12)


def tar(genuine: Sequence[float], impostor: Sequence[float], far: float) -> float:
    """TAR@FAR over all pairs."""
    return float(np.mean(np.array(genuine) >= threshold(genuine, impostor, far)))


def paths(edges: Sequence[Edge], new: str, old: str, passed: tuple[str, ...] = ()) -> list[tuple[Edge, ...]]:
    """All paths along edges without a repeated version, by trying."""
    if new == old:
        return [()]
    steps = [e for e in edges if e.new == new and e.old not in passed]
    return [(e, *rest) for e in steps for rest in paths(edges, e.old, old, (*passed, new))]


def weight_in(path: Any) -> np.ndarray:
    """The only matrix of an ONNX model, float64."""
    import onnx

    weight: np.ndarray = onnx.numpy_helper.to_array(onnx.load(path).graph.initializer[0]).astype(np.float64)
    return weight


def reach(edge: Edge, q: np.ndarray, old: Card, old_q: np.ndarray | None = None) -> np.ndarray:
    """Queries transformed along an edge; `slerp` also needs those of the old encoder."""
    cosine = old.space["kind"] == "cosine"
    if edge.kind is EdgeKind.IDENTITY:
        return q
    if edge.kind in {EdgeKind.TRUNCATE, EdgeKind.ZERO_PAD}:
        first = q[:, : old.dim]
        return unit(first) if edge.kind is EdgeKind.TRUNCATE and cosine else first
    assert edge.folder is not None
    if edge.kind is EdgeKind.ONNX:
        mapped = q @ weight_in(edge.folder / "edge.onnx")
        return unit(mapped) if cosine else mapped
    with np.load(edge.folder / "edge.npz") as stored:
        arrays = {name: stored[name].astype(np.float64) for name in stored}
    mapped = q @ arrays["weight"]
    if edge.kind is EdgeKind.MATRIX:
        return unit(mapped) if cosine else mapped
    alpha = float(arrays["alpha"])
    theta = np.arccos(np.clip((mapped * old_q).sum(axis=1, keepdims=True), -1, 1))
    between: np.ndarray = (np.sin((1 - alpha) * theta) * old_q + np.sin(alpha * theta) * mapped) / np.sin(theta)
    return between


def log_softmax(values: Sequence[float]) -> list[float]:
    """Log-softmax of a list of logits."""
    total = math.log(sum(math.exp(v) for v in values))
    return [v - total for v in values]


def cross_entropy(logits: Sequence[float], label: int) -> float:
    """Cross-entropy of one sample."""
    return -log_softmax(logits)[label]
