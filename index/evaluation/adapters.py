"""Adapters: query edges fitted on pairs of embeddings of the same inputs, without training an encoder, without torch.

Each maps new queries to vectors that search old items. They need only embeddings, so they also connect versions that
were bought rather than trained. `training.adapters.residual_mlp` adds one that needs torch. Shape suffixes: S pairs, M
new dimension, N old dimension, R rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from index.edges.transform import slerp
from index.errors import InvalidArgument
from index.evaluation.metrics import MEAN_AP, retrieval
from index.space import Cosine, Vectors
from index.version import EDGE_ARRAYS, EdgeKind

FEW_PAIRS = 4_000
"""With fewer pairs the recall of the old index falls in Drift-Adapter (Vejendla 2025, arXiv 2509.23471)."""
ALPHAS = tuple(np.linspace(0, 1, 11))
"""The weights that slerp chooses from."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Affine:
    """new W + bias, served as a `matrix` edge. W is (M, N), bias (N,), both float32."""

    weight: Vectors
    bias: Vectors
    kind = EdgeKind.MATRIX

    def __call__(self, new_SM: Vectors) -> Vectors:
        """(S, M) -> (S, N), not normalised; serving normalises if the old space is cosine."""
        return new_SM @ self.weight + self.bias

    def save(self, place: Path) -> None:
        """Write the arrays of `edges/<old>/`."""
        np.savez(place / EDGE_ARRAYS[self.kind], weight=self.weight, bias=self.bias)


@dataclass(frozen=True)
class SlerpAdapter:
    """Spherical interpolation from the old model's query (alpha 0) to the aligned new one (alpha 1).

    W is (M, N) float32, a Procrustes map. If M > N, old vectors are points of the sphere in R^M, padded with zeros:
    only the first N components of the aligned query are kept, and not normalised again, since no item has the others.
    """

    weight: Vectors
    alpha: float
    kind = EdgeKind.SLERP

    def __call__(self, new_SM: Vectors, old_SN: Vectors) -> Vectors:
        """Unit queries of both encoders (S, M) and (S, N) -> (S, N), of length 1, or at most 1 if M > N."""
        return slerp(old_SN, new_SM @ self.weight, self.alpha)

    def save(self, place: Path) -> None:
        """Write the arrays of `edges/<old>/`."""
        np.savez(place / EDGE_ARRAYS[self.kind], weight=self.weight, alpha=np.float32(self.alpha))


def procrustes(new_SM: Vectors, old_SN: Vectors) -> Affine:
    """The orthogonal map (reflections allowed) with the least squared distance of new to old (Schonemann 1966).

    W = U V^T of the singular value decomposition of new^T old. The thin decomposition pads the smaller space with
    zeros: W has orthonormal columns (M >= N) or rows (M <= N).
    """
    new, old = check_pairs(new_SM, old_SN)
    return Affine(orthogonal(new, old).astype(np.float32), np.zeros(old.shape[1], np.float32))


def ridge(new_SM: Vectors, old_SN: Vectors, *, strength: float = 1e-3) -> Affine:
    """Least squares with an L2 penalty on W, `strength` times the mean variance of a new component; not on the bias.

    Raises:
        InvalidArgument: `strength` is not above 0, or the pairs do not determine the map.
    """
    if not strength > 0:
        raise InvalidArgument(f"strength must be above 0, not {strength}", pointer="/strength")
    new, old = check_pairs(new_SM, old_SN)
    return _affine(_ridge(new, old, strength)[0], new, old)


def low_rank(new_SM: Vectors, old_SN: Vectors, *, rank: int = 64, strength: float = 1e-3) -> Affine:
    """Affine map whose W has at most this rank: `ridge`, projected on the principal directions of its predictions.

    This is the least-squares solution among matrices of this rank (reduced-rank regression, Izenman 1975);
    Drift-Adapter (arXiv 2509.23471) fits the same family by gradient descent.

    Raises:
        InvalidArgument: `rank` is not 1 to the smaller dimension, `strength` not above 0, or the pairs do not
            determine the map.
    """
    new, old = check_pairs(new_SM, old_SN)
    if not 1 <= rank <= min(new.shape[1], old.shape[1]):
        raise InvalidArgument(f"rank must be 1 to {min(new.shape[1], old.shape[1])}, not {rank}", pointer="/rank")
    if not strength > 0:
        raise InvalidArgument(f"strength must be above 0, not {strength}", pointer="/strength")
    weight_MN, root_MM = _ridge(new, old, strength)
    *_, main_NN = np.linalg.svd(root_MM @ weight_MN, full_matrices=False)
    return _affine(weight_MN @ main_NN[:rank].T @ main_NN[:rank], new, old)


def fit_slerp(new_SM: Vectors, old_SN: Vectors, labels_S: Ints) -> SlerpAdapter:
    """Procrustes, and the alpha of `ALPHAS` with the best retrieval on the support set (Ricci 2026, 2609.39836).

    The paper chooses by Recall@1 across two modalities, where a query is not an item. Within one modality the old query
    is its own item, so it is left out and items of its class are relevant: CMC@1, ties by mAP.

    Args:
        new_SM: unit new embeddings of the support set.
        old_SN: unit old embeddings of the same images.
        labels_S: their classes.
    """
    new, old = check_pairs(new_SM, old_SN)
    weight = orthogonal(new, old).astype(np.float32)
    old_SN = np.ascontiguousarray(old, dtype=np.float32)
    aligned_SN = new.astype(np.float32) @ weight
    best = max(ALPHAS, key=lambda alpha: _support_score(slerp(old_SN, aligned_SN, alpha), old_SN, labels_S))
    return SlerpAdapter(weight, float(best))


def few_pairs_warning(count: int) -> str | None:
    """A warning if an adapter is fitted on fewer than FEW_PAIRS pairs, else None."""
    return f"{count} pairs: fewer than {FEW_PAIRS} leave an adapter's score uncertain" if count < FEW_PAIRS else None


def check_pairs(new_SM: Any, old_SN: Any) -> tuple[Floats, Floats]:
    """Check the pairs; returns them in float64.

    Raises:
        InvalidArgument: not two finite arrays (S, dim) of the same S >= 2.
    """
    new, old = np.asarray(new_SM, dtype=np.float64), np.asarray(old_SN, dtype=np.float64)
    if new.ndim != 2 or old.ndim != 2 or len(new) != len(old) or len(new) < 2:
        raise InvalidArgument(
            f"pairs are two arrays (S, dim) of the same S >= 2 images, not {new.shape} and {old.shape}",
            pointer="/pairs",
        )
    if not (np.isfinite(new).all() and np.isfinite(old).all()):
        raise InvalidArgument("pairs must be finite numbers", pointer="/pairs")
    return new, old


def orthogonal(new: Floats, old: Floats) -> Floats:
    """(M, N) with orthonormal columns or rows: U V^T of the singular value decomposition of new^T old."""
    left, _, right = np.linalg.svd(new.T @ old, full_matrices=False)
    return np.asarray(left @ right)


def _ridge(new: Floats, old: Floats, strength: float) -> tuple[Floats, Floats]:
    """W (M, N), and a root R (M, M) of the penalised covariance R^T R.

    Raises:
        InvalidArgument: the pairs do not determine the map.
    """
    new, old = new - new.mean(0), old - old.mean(0)
    gram_MM = new.T @ new
    gram_MM += strength * max(np.trace(gram_MM) / len(gram_MM), np.finfo(np.float64).tiny) * np.eye(len(gram_MM))
    try:
        weight_MN, root_MM = np.linalg.solve(gram_MM, new.T @ old), np.linalg.cholesky(gram_MM).T
    except np.linalg.LinAlgError as error:
        raise _undetermined(len(new)) from error
    if not np.isfinite(weight_MN.astype(np.float32)).all():
        raise _undetermined(len(new))
    return np.asarray(weight_MN), np.asarray(root_MM)


def _undetermined(pairs: int) -> InvalidArgument:
    return InvalidArgument(
        f"{pairs} pairs do not determine such a map: their new embeddings hardly differ, or strength is too small for "
        "so few",
        pointer="/pairs",
    )


def _affine(weight: Floats, new: Floats, old: Floats) -> Affine:
    return Affine(weight.astype(np.float32), (old.mean(0) - new.mean(0) @ weight).astype(np.float32))


def _support_score(queries_SN: Vectors, items_SN: Vectors, labels_S: Ints) -> tuple[float, float]:
    found = retrieval(queries_SN, labels_S, items_SN, labels_S, Cosine(), remove_self=np.arange(len(labels_S)), ks=(1,))
    return found.mean("cmc@1"), found.mean(MEAN_AP)
