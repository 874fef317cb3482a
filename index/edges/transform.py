"""The transforms of edges: one class per kind, listed in `TRANSFORMS`; `load_transform` opens one.

A query transform maps queries of the new version into the old version's space; the forward transform maps stored items
of the old version into the new space. Two need an extra input: `slerp` the same queries embedded by the old encoder,
`forward` the items' side-information. `dual` has no transform: the old encoder embeds the query.
Shape suffixes: N vectors, D old or new dimension as named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from index.errors import InvalidVector, InvalidVersionFolder, raise_if_out_of_memory
from index.space import Cosine, Space, Vectors, space_from_json
from index.version import EDGE_ARRAYS, EDGE_MODEL, Card, Edge, EdgeKind
from index.version_folder.artifacts import open_model, read_arrays, wrong_file


class Transform(Protocol):
    """The opened transform of one edge."""

    def __call__(self, x_ND: Vectors, extra_NS: Vectors | None = None) -> Vectors:
        """(N, from-dim) vectors and the extra input of the edge -> (N, to-dim) vectors."""


class Identity:
    """Same space: compare directly (BCT, HBCT)."""

    def __init__(self, edge: Edge, new: Card, old: Card) -> None:
        _require(edge, new.dim == old.dim, f"needs equal dimensions, not {new.dim} and {old.dim}")

    def __call__(self, x_ND: Vectors, extra_NS: Vectors | None = None) -> Vectors:
        return x_ND


class ZeroPad:
    """Old items padded with zeros: the first n components of the query, not normalised again (OCA's evaluation)."""

    def __init__(self, edge: Edge, new: Card, old: Card) -> None:
        _require(edge, new.dim >= old.dim, f"needs dim >= {old.dim}, not {new.dim}")
        self.dim = old.dim

    def __call__(self, x_ND: Vectors, extra_NS: Vectors | None = None) -> Vectors:
        return np.ascontiguousarray(x_ND[:, : self.dim])


class Truncate(ZeroPad):
    """The first n components, normalised for the old space (BT2, OCA, BCT with extra dimensions)."""

    def __init__(self, edge: Edge, new: Card, old: Card) -> None:
        super().__init__(edge, new, old)
        self.space = space_from_json(old.space)

    def __call__(self, x_ND: Vectors, extra_NS: Vectors | None = None) -> Vectors:
        return normalise_or_zero(self.space, super().__call__(x_ND))


class Matrix:
    """x W + b with W (new dim, old dim): Procrustes, ridge, low-rank affine; fitted on pairs."""

    def __init__(self, edge: Edge, new: Card, old: Card) -> None:
        assert edge.folder is not None
        file = EDGE_ARRAYS[edge.kind]
        shapes = {"weight": (new.dim, old.dim), "bias": (old.dim,)}
        name, expected = f"edges/{edge.old}/{file}", edge.hashes.get(file)
        arrays = read_arrays(edge.folder / file, name, shapes, frozenset({"bias"}), expected)
        self.weight, self.bias = arrays["weight"], arrays.get("bias", np.float32(0))
        self.space = space_from_json(old.space)

    def __call__(self, x_ND: Vectors, extra_NS: Vectors | None = None) -> Vectors:
        return normalise_or_zero(self.space, x_ND @ self.weight + self.bias)


class Onnx:
    """A learned query map, new -> old: input `embedding` (N, new dim), output (N, old dim)."""

    def __init__(self, edge: Edge, new: Card, old: Card) -> None:
        self.model = _EdgeModel(edge, new.dim, old.dim, 0)
        self.space = space_from_json(old.space)

    def __call__(self, x_ND: Vectors, extra_NS: Vectors | None = None) -> Vectors:
        return normalise_or_zero(self.space, self.model(x_ND, None))


class Slerp:
    """Spherical interpolation from the old encoder's query (alpha 0) to the aligned new one (alpha 1).

    edge.npz holds `weight` W (new dim, old dim), a Procrustes map, and `alpha` in [0, 1] (Ricci 2026, arXiv
    2609.39836). If the new space is wider, only the first components of the aligned query are kept, and the output is
    not normalised again: the old vectors are points of the larger sphere, padded with zeros.
    """

    def __init__(self, edge: Edge, new: Card, old: Card) -> None:
        assert edge.folder is not None
        spaces = (space_from_json(new.space), space_from_json(old.space))
        _require(edge, spaces == (Cosine(), Cosine()), "needs cosine spaces on both sides")
        file = EDGE_ARRAYS[edge.kind]
        shapes: dict[str, tuple[int, ...]] = {"weight": (new.dim, old.dim), "alpha": ()}
        arrays = read_arrays(edge.folder / file, f"edges/{edge.old}/{file}", shapes, expected=edge.hashes.get(file))
        self.old, self.weight, self.alpha = old, arrays["weight"], float(arrays["alpha"])
        _require(edge, 0 <= self.alpha <= 1, f"needs alpha in [0, 1], not {self.alpha:g}")

    def __call__(self, x_ND: Vectors, extra_NS: Vectors | None = None) -> Vectors:
        if extra_NS is None or extra_NS.shape != (len(x_ND), self.old.dim):
            raise InvalidVector(f"the slerp edge to {self.old.name!r} needs the queries by that version's encoder too")
        return slerp(extra_NS, x_ND @ self.weight, self.alpha)


@dataclass(frozen=True)
class TransformedItems:
    """The output of a forward transform.

    Attributes:
        vectors_ND: valid for the new space.
        side_NS: the new version's side-information, if the edge gives it (FCT's g).
        variance_N: the uncertainty of each item, if the edge gives it.
    """

    vectors_ND: Vectors
    side_NS: Vectors | None = None
    variance_N: Vectors | None = None


class Forward:
    """FCT's h: stored old embedding and side-information -> new space (Ramanujan, CVPR 2022, eq. 4).

    edge.onnx may have two more outputs: `next_side` (N, new side_dim), the new version's side-information (FCT's g),
    and `variance` (N, 1), at least 0.
    """

    def __init__(self, edge: Edge, new: Card, old: Card) -> None:
        extras = {"variance": 1, **({"next_side": new.side_dim} if new.side_dim else {})}
        self.model = _EdgeModel(edge, old.dim, new.dim, old.side_dim, extras)
        self.space = space_from_json(new.space)

    def __call__(self, x_ND: Vectors, extra_NS: Vectors | None = None) -> Vectors:
        return self.transform_items(x_ND, extra_NS).vectors_ND

    @property
    def has_variance(self) -> bool:
        """Whether the edge gives a variance of each item."""
        return "variance" in self.model.widths

    @property
    def has_side(self) -> bool:
        """Whether the edge gives the new version's side-information."""
        return "next_side" in self.model.widths

    def transform_items(self, x_ND: Vectors, side_NS: Vectors | None = None) -> TransformedItems:
        """All outputs of the edge for (N, old dim) vectors and, if it needs it, side-information."""
        given, extras = self.model.run(x_ND, side_NS)
        variance_N1 = extras.get("variance")
        return TransformedItems(
            normalise_or_zero(self.space, given),
            extras.get("next_side"),
            None if variance_N1 is None else variance_N1[:, 0],
        )


TRANSFORMS: dict[EdgeKind, Callable[[Edge, Card, Card], Transform]] = {
    EdgeKind.IDENTITY: Identity,
    EdgeKind.TRUNCATE: Truncate,
    EdgeKind.ZERO_PAD: ZeroPad,
    EdgeKind.MATRIX: Matrix,
    EdgeKind.ONNX: Onnx,
    EdgeKind.SLERP: Slerp,
    EdgeKind.FORWARD: Forward,
}


def load_transform(edge: Edge, new: Card, old: Card) -> Transform:
    """Open the transform of an edge.

    Raises:
        InvalidVersionFolder: dimensions, spaces or the edge's files do not fit the two cards.
    """
    _require(edge, edge.kind in TRANSFORMS, f"has no transform; legal: {', '.join(TRANSFORMS)}")
    if edge.kind in {EdgeKind.IDENTITY, EdgeKind.TRUNCATE, EdgeKind.ZERO_PAD}:
        same = space_from_json(new.space) == space_from_json(old.space)
        _require(edge, same, f"needs the same space on both sides, not {dict(new.space)} and {dict(old.space)}")
    if edge.old_encoder and old.encoder and edge.old_encoder != old.encoder:
        raise InvalidVersionFolder(
            f"edges/{edge.old} was made for a different encoder than the registered {edge.old!r}",
            pointer=f"/edges/{edge.old}/old_encoder",
        )
    return TRANSFORMS[edge.kind](edge, new, old)


def load_forward(edge: Edge, new: Card, old: Card) -> Forward:
    """`load_transform` for an item edge, kind `forward`; same errors."""
    transform = load_transform(edge, new, old)
    assert isinstance(transform, Forward)
    return transform


def normalise_or_zero(space: Space, x_ND: Vectors) -> Vectors:
    """Normalise vectors for `space`; an all-zero vector stays zero and scores 0 with every item."""
    if not isinstance(space, Cosine):
        return np.ascontiguousarray(x_ND, dtype=np.float32)
    norm_N1 = np.linalg.norm(x_ND.astype(np.float64), axis=1, keepdims=True)
    return np.ascontiguousarray(x_ND / np.where(norm_N1 > 0, norm_N1, 1.0), dtype=np.float32)


def slerp(from_NS: Vectors, to_NS: Vectors, alpha: float) -> Vectors:
    """Spherical interpolation of rows, at the share `alpha` of the arc: (N, S), (N, S) -> (N, S).

    sin((1 - alpha) theta) / sin(theta) from + sin(alpha theta) / sin(theta) to, cos(theta) = <from, to>. Unit vectors
    give unit vectors; the norm of `to` may be below 1 if it is a part of a longer unit vector (see `Slerp`).
    """
    start, end = from_NS.astype(np.float64), to_NS.astype(np.float64)
    theta_N1 = np.arccos(np.clip(np.sum(start * end, axis=1, keepdims=True), -1, 1))
    # Equal rows have no arc and opposite rows have many: use the limit for equal rows.
    arc_N1 = np.sin(theta_N1) > 1e-6
    sine_N1 = np.where(arc_N1, np.sin(theta_N1), 1.0)
    start_N1 = np.where(arc_N1, np.sin((1 - alpha) * theta_N1) / sine_N1, 1 - alpha)
    end_N1 = np.where(arc_N1, np.sin(alpha * theta_N1) / sine_N1, alpha)
    return np.ascontiguousarray(start_N1 * start + end_N1 * end, dtype=np.float32)


class _EdgeModel:
    """The edge.onnx of an edge.

    Its inputs are `embedding` (N, from_dim) and, if side_dim > 0, `side` (N, side_dim). Its first output is
    (N, to_dim); `extras` has the names and widths of legal further outputs.
    """

    def __init__(
        self, edge: Edge, from_dim: int, to_dim: int, side_dim: int, extras: Mapping[str, int] | None = None
    ) -> None:
        assert edge.folder is not None
        file = EDGE_MODEL[edge.kind]
        self.edge, self.to_dim, self.side_dim = edge, to_dim, side_dim
        self.session = open_model(edge.folder / file, f"edges/{edge.old}/{file}", expected=edge.hashes.get(file))
        names = {i.name for i in self.session.get_inputs()}
        expected = {"embedding", "side"} if side_dim else {"embedding"}
        _require(edge, names == expected, f"needs edge.onnx inputs {sorted(expected)}, not {sorted(names)}")
        self.widths = {o.name: (extras or {}).get(o.name) for o in self.session.get_outputs()[1:]}
        _require(edge, None not in self.widths.values(), f"has no use for edge.onnx outputs {sorted(self.widths)}")
        for count in (1, 3):  # a model with a fixed batch size passes only one
            self(np.full((count, from_dim), from_dim**-0.5, np.float32), np.zeros((count, side_dim), np.float32))

    def __call__(self, x_ND: Vectors, side_NS: Vectors | None) -> Vectors:
        return self.run(x_ND, side_NS)[0]

    def run(self, x_ND: Vectors, side_NS: Vectors | None) -> tuple[Vectors, dict[str, Vectors]]:
        """The first output, and the further ones by name."""
        feeds = {"embedding": np.ascontiguousarray(x_ND, dtype=np.float32)}
        if self.side_dim:
            if side_NS is None or side_NS.shape != (len(x_ND), self.side_dim):
                raise InvalidVector(f"the edge to {self.edge.old!r} needs {self.side_dim} numbers of side-information")
            feeds["side"] = np.ascontiguousarray(side_NS, dtype=np.float32)
        try:
            first, *others = self.session.run(None, feeds)
        except Exception as error:  # onnxruntime's own exception types share no public base
            raise_if_out_of_memory(error)
            raise self._wrong(f"fails on a batch of {len(x_ND)} ({error})") from error
        extras = dict(zip(self.widths, others, strict=True))
        for name, given, width in (("", first, self.to_dim), *((n, extras[n], w) for n, w in self.widths.items())):
            self._check(name, given, (len(x_ND), width))
        if "variance" in extras and (extras["variance"] < 0).any():
            raise self._wrong("gives a variance below 0")
        return np.asarray(first, np.float32), {name: np.asarray(given, np.float32) for name, given in extras.items()}

    def _check(self, name: str, given: Vectors, shape: tuple[int, int | None]) -> None:
        what = f"{name} of " if name else ""
        if given.shape != shape:
            raise self._wrong(f"gives {what}shape {given.shape} for {shape[0]} vectors, not (N, {shape[1]})")
        if not np.isfinite(given).all():
            raise self._wrong(f"gives {what}numbers that are not finite")

    def _wrong(self, why: str) -> InvalidVersionFolder:
        return wrong_file(f"edges/{self.edge.old}/{EDGE_MODEL[self.edge.kind]}", why)


def _require(edge: Edge, holds: bool, why: str) -> None:
    if not holds:
        raise InvalidVersionFolder(f"edges/{edge.old}: kind {edge.kind.value} {why}", pointer=f"/edges/{edge.old}")
