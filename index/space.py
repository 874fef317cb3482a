"""Spaces (`Space`): layout, order and score of the vectors of a version; `check_vectors` validates vectors.

A shard stores `space.items(x)` and scans with `space.queries(q)` by inner product or squared L2; `space.score` converts
scan results to the scores that users see. Each space defines its order once, in `higher_is_better`.

Lorentz layout (curvature K > 0): the stored vector is the space part x; the time part t = sqrt(1/K + |x|^2) is
recomputed. Items become [x, t] and queries [q, -t(q)], so that the Lorentz inner product <q, x>_L is an ordinary one,
and distance = acosh(-K <q, x>_L) / sqrt(K) falls as it rises. Far from the origin that product is a small difference of
large numbers, so the scan only finds candidates, and `Lorentz.distances` scores them without the cancellation.

Shape suffixes: N vectors, D the version's dimension, W the width of a stored row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from index.errors import InvalidArgument, InvalidVector

Vectors = NDArray[np.float32]
"""float32, C-contiguous, one vector a row."""


class Space(Protocol):
    """A space: the operations that shards, galleries and evaluation need."""

    kind: str
    higher_is_better: bool
    inner_product: bool
    """True: the scan is an inner product, larger first. False: squared L2, smaller first."""

    def width(self, dim: int) -> int:
        """Length of a stored row for vectors of `dim` components."""

    def items(self, x_ND: Vectors) -> Vectors:
        """(N, D) valid vectors -> (N, W) rows to store."""

    def queries(self, x_ND: Vectors) -> Vectors:
        """(N, D) valid vectors -> (N, W) rows to scan with."""

    def normalise(self, x_ND: Vectors) -> Vectors:
        """(N, D) raw vectors -> the nearest valid vectors of this space."""

    def score(self, scanned: Vectors) -> Vectors:
        """Scan results of any shape -> the scores that users see, same shape."""

    def as_json(self) -> dict[str, Any]:
        """The `space` field of a card."""


class _StoredAsTheyAre:
    """Base of spaces whose vectors are stored and scanned unchanged."""

    kind: str

    def width(self, dim: int) -> int:
        return dim

    def items(self, x_ND: Vectors) -> Vectors:
        return x_ND

    def queries(self, x_ND: Vectors) -> Vectors:
        return x_ND

    def as_json(self) -> dict[str, Any]:
        return {"kind": self.kind}


@dataclass(frozen=True)
class Cosine(_StoredAsTheyAre):
    """Unit vectors, inner product; score in [-1, 1], higher is better."""

    kind = "cosine"
    higher_is_better = True
    inner_product = True

    def normalise(self, x_ND: Vectors) -> Vectors:
        norm_N1 = np.linalg.norm(x_ND.astype(np.float64), axis=1, keepdims=True)
        return np.ascontiguousarray(x_ND / norm_N1, dtype=np.float32)

    def score(self, scanned: Vectors) -> Vectors:
        return scanned


@dataclass(frozen=True)
class Euclidean(_StoredAsTheyAre):
    """Euclidean distance; score in [0, inf), lower is better."""

    kind = "l2"
    higher_is_better = False
    inner_product = False

    def normalise(self, x_ND: Vectors) -> Vectors:
        return x_ND

    def score(self, scanned: Vectors) -> Vectors:
        # |q|^2 - 2qx + |x|^2 can round below zero for nearly equal vectors.
        return np.sqrt(np.maximum(scanned, 0.0))


MIN_CURVATURE, MAX_CURVATURE = 1e-12, 1e12
"""Beyond these the time part overflows float32, or the space part is lost in it by rounding."""


@dataclass(frozen=True)
class Lorentz:
    """Hyperboloid of curvature -K, geodesic distance; score in [0, inf), lower is better (HBCT, 2506.05826)."""

    curvature: float = 1.0
    kind = "lorentz"
    higher_is_better = False
    inner_product = True

    def __post_init__(self) -> None:
        if not MIN_CURVATURE <= self.curvature <= MAX_CURVATURE:
            legal = f"a finite number above 0, {MIN_CURVATURE:g} to {MAX_CURVATURE:g}"
            raise InvalidArgument(f"space curvature must be {legal}", pointer="/space/curvature")

    def width(self, dim: int) -> int:
        return dim + 1

    def items(self, x_ND: Vectors) -> Vectors:
        return np.hstack([x_ND, self._time(x_ND)])

    def queries(self, x_ND: Vectors) -> Vectors:
        return np.hstack([x_ND, -self._time(x_ND)])

    def normalise(self, x_ND: Vectors) -> Vectors:
        return x_ND

    def score(self, scanned: Vectors) -> Vectors:
        # acosh is defined from 1 on; for two equal points the argument can round to just below.
        argument = np.maximum(-self.curvature * scanned.astype(np.float64), 1.0)
        distance: Vectors = (np.arccosh(argument) / np.sqrt(self.curvature)).astype(np.float32)
        return distance

    def distances(self, query_D: Vectors, rows_NW: Vectors) -> NDArray[np.float64]:
        """The distances of one query to stored rows (N,), in float64."""
        return self._distance(self._chords(query_D.astype(np.float64), rows_NW[:, :-1].astype(np.float64)))

    def pairwise(self, queries_BW: NDArray[np.float64], rows_NW: NDArray[np.float64]) -> NDArray[np.float64]:
        """The distances (B, N) of queries to rows, both in this layout; equal to `distances` up to float32.

        Squared differences are computed from inner products if the rounding error, at most 4 u (D + 2) (|q|^2 + |x|^2)
        for unit roundoff u (Higham 2002, 3.1), is below that of float32, else directly, pair by pair.
        """
        q_BD, x_ND = queries_BW[:, :-1], rows_NW[:, :-1]
        q_B1, x_N = np.square(q_BD).sum(axis=1, keepdims=True), np.square(x_ND).sum(axis=1)
        along_BN = (q_B1 - x_N) / (self._exact_time(q_BD) + self._exact_time(x_ND)[:, 0])
        chord_BN = q_B1 + x_N - 2 * (q_BD @ x_ND.T) - np.square(along_BN)
        unsure_BN = chord_BN < 2.0**-25 * (q_BD.shape[1] + 2) * (q_B1 + x_N)
        for row in np.flatnonzero(unsure_BN.any(axis=1)):
            chord_BN[row, unsure_BN[row]] = self._chords(q_BD[row], x_ND[unsure_BN[row]])
        return self._distance(chord_BN)

    def _chords(self, q_D: NDArray[np.float64], x_ND: NDArray[np.float64]) -> NDArray[np.float64]:
        """2 (-<q, x>_L - 1/K) = |q - x|^2 - (t(q) - t(x))^2, (N,), without cancellation of large numbers.

        The difference of times is (|q|^2 - |x|^2) / (t(q) + t(x)). Far out and in nearly one direction from the origin,
        the two squares are nearly equal too: then the chord is computed from lengths and directions.
        """
        across_ND = q_D - x_ND
        times_N = (self._exact_time(q_D[None]) + self._exact_time(x_ND))[:, 0]
        longer_N = (across_ND * (q_D + x_ND)).sum(axis=1)
        across_N = np.square(across_ND).sum(axis=1)
        chord_N: NDArray[np.float64] = np.maximum(across_N - np.square(longer_N / times_N), 0.0)
        # The difference is uncertain by about 4 u (D + 2) |q - x|^2, compare `pairwise`.
        if (unsure_N := chord_N < 2.0**-25 * (len(q_D) + 2) * across_N).any():
            chord_N[unsure_N] = self._polar_chords(q_D, x_ND[unsure_N], longer_N[unsure_N])
        return chord_N

    def _polar_chords(
        self, q_D: NDArray[np.float64], x_ND: NDArray[np.float64], longer_N: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """`_chords` as the sum of two terms that are at least 0, (N,); `longer_N`: |q|^2 - |x|^2, not both are 0.

        2 (cosh(a) - 1) / K for the difference a of the distances from the origin, sinh(a) = (|q|^2 - |x|^2) /
        (|q| t(x) + |x| t(q)); and |q| |x| |q / |q| - x / |x||^2.
        """
        # The origin has no direction: its second term is 0.
        q_length, x_length_N = (
            np.maximum(np.sqrt(np.square(v_ND).sum(axis=1)), np.finfo(np.float64).tiny) for v_ND in (q_D[None], x_ND)
        )
        times_N = q_length * self._exact_time(x_ND)[:, 0] + x_length_N * self._exact_time(q_D[None])[:, 0]
        sinh_square_N = np.square(longer_N / times_N)
        apart_ND = q_D / q_length - x_ND / x_length_N[:, None]
        along_N = 2 * sinh_square_N / (self.curvature * (1 + np.sqrt(1 + sinh_square_N)))
        chord_N: NDArray[np.float64] = along_N + q_length * x_length_N * np.square(apart_ND).sum(axis=1)
        return chord_N

    def _distance(self, chord: NDArray[np.float64]) -> NDArray[np.float64]:
        distance: NDArray[np.float64] = 2 * np.arcsinh(np.sqrt(self.curvature * chord) / 2) / np.sqrt(self.curvature)
        return distance

    def nearest(self, query_D: Vectors, scanned: float) -> float:
        """A lower bound of the distance of all rows whose product in the scan is at most `scanned`.

        The error of the scan is at most 2 u (W + 2) t(q) t(x) for width W and unit roundoff u (Higham 2002, 3.1), and
        -<q, x>_L >= t(x) / (2 K t(q)): the true -K <q, x>_L is at least -K scanned / (1 + 4 u (W + 2) K t(q)^2).
        """
        time = float(self._exact_time(query_D[None].astype(np.float64))[0, 0])
        slack = 4 * 2.0**-24 * (len(query_D) + 3) * self.curvature * time**2
        return float(np.arccosh(max(-self.curvature * scanned / (1 + slack), 1.0)) / np.sqrt(self.curvature))

    def as_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "curvature": self.curvature}

    def _exact_time(self, x_ND: NDArray[np.float64]) -> NDArray[np.float64]:
        time_N1: NDArray[np.float64] = np.sqrt(1.0 / self.curvature + np.square(x_ND).sum(axis=1, keepdims=True))
        return time_N1

    def _time(self, x_ND: Vectors) -> Vectors:
        square_N1 = np.sum(np.square(x_ND, dtype=np.float64), axis=1, keepdims=True)
        time_N1: Vectors = np.sqrt(1.0 / self.curvature + square_N1).astype(np.float32)
        return time_N1


SPACES: dict[str, type[Cosine | Euclidean | Lorentz]] = {
    Cosine.kind: Cosine,
    Euclidean.kind: Euclidean,
    Lorentz.kind: Lorentz,
}

UNIT_TOLERANCE = 1e-3
"""Largest difference from length 1 of a cosine vector of a model; float16 transport rounds by about 5e-4."""

MAX_NUMBER = float(np.finfo(np.float32).max)
MIN_NORM = 1e-12
"""A shorter cosine vector has no direction."""
MAX_NORM = 1e15
"""Squared distances and Lorentz inner products of longer vectors overflow float32."""


def space_from_json(value: object) -> Space:
    """Read a card's `space` field.

    Raises:
        InvalidArgument: an unknown kind or field, or a curvature outside `MIN_CURVATURE` to `MAX_CURVATURE`.
    """
    if not isinstance(value, dict) or value.get("kind") not in list(SPACES):
        raise InvalidArgument(f"space.kind must be one of {', '.join(SPACES)}", pointer="/space/kind")
    arguments = {name: v for name, v in value.items() if name != "kind"}
    legal = {"curvature"} if value["kind"] == Lorentz.kind else set()
    if unknown := set(arguments) - legal:
        raise InvalidArgument(f"space has unknown field {min(unknown)!r}", pointer="/space")
    if not all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in arguments.values()):
        raise InvalidArgument("space curvature must be a number", pointer="/space/curvature")
    return SPACES[value["kind"]](**arguments)


def check_vectors(value: object, dim: int, space: Space, *, pointer: str = "/embedding", version: str = "") -> Vectors:
    """Validate vectors from outside and return them as (N, dim) float32, normalised if the space is cosine.

    `version`: the version of the vectors, for messages.

    Raises:
        InvalidVector: not numeric, a wrong dimension, NaN, infinite, too long, or of length 0 in the cosine space. The
            pointer names the first invalid row if several vectors were given.
    """
    try:
        given = np.asarray(value)
    except ValueError:  # ragged lists
        given = np.empty(0, object)
    if given.dtype.kind not in "iuf":
        raise InvalidVector(f"an embedding must be a list of {dim} numbers", pointer=pointer)
    x = given if given.dtype == np.float32 else given.astype(np.float64, copy=False)
    x_ND = x[None] if x.ndim == 1 else x
    if x_ND.ndim != 2 or x_ND.shape[1] != dim:
        found = x_ND.shape[1] if x_ND.ndim == 2 else f"shape {'x'.join(map(str, x.shape))}"
        by = f" by {version!r}" if version else ""
        raise InvalidVector(f"an embedding{by} must have {dim} numbers, not {found}", pointer=pointer)
    norm_N = _lengths(x_ND)
    if len(norm_N) == 1:  # one query: `min` and `max` would double the time
        least = most = norm_N.item()
    else:
        least, most = norm_N.min(initial=np.inf), norm_N.max(initial=0.0)
    if not most <= MAX_NORM:  # else all numbers are finite as float32
        _check_finite(x_ND, x, pointer)
    if isinstance(space, Cosine):
        if least < MIN_NORM:
            zero = int(np.argmax(norm_N < MIN_NORM))
            raise InvalidVector("an all-zero embedding has no direction to compare", pointer=_at(pointer, x, zero))
        unit_ND = np.empty(x_ND.shape, np.float32)
        np.divide(x_ND, norm_N[:, None], out=unit_ND, casting="same_kind")  # NumPy computes in float64, by blocks
        return unit_ND
    if (long_N := norm_N > MAX_NORM).any():
        why = f"an embedding of space {space.kind} must have a norm of at most {MAX_NORM:g}"
        raise InvalidVector(why, pointer=_at(pointer, x, int(np.argmax(long_N))))
    return np.ascontiguousarray(x_ND, dtype=np.float32)


def _lengths(x_ND: NDArray[Any]) -> NDArray[np.float64]:
    """L2 norms (N,) in float64."""
    if x_ND.dtype == np.float64:  # same sums; without `dtype` one row takes half the time
        square_N = np.einsum("nd,nd->n", x_ND, x_ND)
    else:
        square_N = np.einsum("nd,nd->n", x_ND, x_ND, dtype=np.float64)
    length_N: NDArray[np.float64] = np.sqrt(square_N)
    return length_N


def _check_finite(x_ND: NDArray[Any], given: NDArray[Any], pointer: str) -> None:
    # Vectors are stored as float32: a finite float64 that overflows it is refused too.
    finite_N = np.abs(x_ND).max(axis=1) <= MAX_NUMBER  # False for a row with NaN
    if not finite_N.all():
        at = _at(pointer, given, int(np.argmin(finite_N)))
        raise InvalidVector("an embedding must be finite numbers (float32)", pointer=at)


def _at(pointer: str, given: NDArray[np.float64], row: int) -> str:
    return pointer if given.ndim == 1 else f"{pointer}/{row}"
