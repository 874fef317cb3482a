"""What a worker computes for a chunk: new embeddings from images, or from the embeddings that are stored.

One item that cannot be moved never holds up the others: it becomes a `Failed` with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TypeVar

import numpy as np
from sqlalchemy import Row

from index.encoder import BATCH, Embedded
from index.errors import InvalidImage, RegraftError
from index.image import Pixels, decode_image, preprocess
from index.space import check_vectors, space_from_json
from index.transform import Forward, load_forward
from index.version import EdgeKind, Preprocess
from service.blobs import Blobs
from service.catalog import Catalog, Registered
from service.chunks import Failed, Moved
from service.repository import from_bytes

X = TypeVar("X")

Outcome = tuple[list[Moved], list[Failed]]
Stored = Row[int, int, int, bytes, bytes | None]


class Mover:
    """Computes embeddings of a target version. Holds the encoders and edges it has used."""

    def __init__(self, catalog: Catalog, blobs: Blobs, max_pixels: int) -> None:
        self._catalog = catalog
        self._blobs = blobs
        self._max_pixels = max_pixels
        self._transforms: dict[int, Forward] = {}

    def reencode(self, target: Registered, rows: Sequence[Row[int, int, str]]) -> Outcome:
        """Encode the stored images of `chunks.read_images`."""
        encoder = target.encoder()
        moved: list[Moved] = []
        failed: list[Failed] = []
        for block in (rows[start : start + BATCH] for start in range(0, len(rows), BATCH)):
            readable: list[tuple[Row[int, int, str], Pixels]] = []
            for row in block:
                try:
                    readable.append((row, self._read(row.blob, encoder.spec)))
                except InvalidImage as error:
                    failed.append(Failed(row.id, row.seq, error.message))
            _collect((moved, failed), _embed(readable, lambda pixels: encoder.encode_arrays(np.stack(pixels))))
        return moved, failed

    def transform(self, target: Registered, rows: Sequence[Stored]) -> Outcome:
        """Apply the item edges from their active versions to the stored embeddings of `chunks.read_embeddings`."""
        moved: list[Moved] = []
        failed: list[Failed] = []
        for old_id, group in groupby(sorted(rows, key=lambda row: row.active_id), key=lambda row: row.active_id):
            apply = self._forward(self._catalog.by_id(old_id), target)
            _collect((moved, failed), _embed([(row, row) for row in group], apply))
        return moved, failed

    def _read(self, blob: str, spec: Preprocess) -> Pixels:
        try:
            data = self._blobs.read(blob)
        except FileNotFoundError as error:
            raise InvalidImage("the stored image is missing") from error
        return preprocess(decode_image(data, max_pixels=self._max_pixels), spec)

    def _forward(self, old: Registered, new: Registered) -> Callable[[Sequence[Stored]], Embedded]:
        transform = self._transform(old, new)
        space = space_from_json(dict(new.card.space))

        def apply(rows: Sequence[Stored]) -> Embedded:
            side = [row.side for row in rows if row.side is not None]
            # Without any, or with too few, the edge says itself that it needs side-information.
            sides = from_bytes(side, old.card.side_dim) if side and old.card.side_dim else None
            given = transform.carry(from_bytes([row.vector for row in rows], old.card.dim), sides)
            return Embedded(check_vectors(given.vectors_ND, new.card.dim, space), given.side_NS)

        return apply

    def _transform(self, old: Registered, new: Registered) -> Forward:
        # Edges come and go while a worker runs; one that a backfill applies cannot be removed, but replaced.
        self._catalog.sync_edges()
        declared = self._catalog.edge((new.name, old.name, EdgeKind.FORWARD.value))
        assert declared is not None, "the plan holds items of versions with an item edge only"
        if declared.id not in self._transforms:
            self._transforms[declared.id] = load_forward(declared.edge, new.card, old.card)
        return self._transforms[declared.id]


def _embed(
    inputs: Sequence[tuple[Row[int, int, *tuple[object, ...]], X]], embed: Callable[[Sequence[X]], Embedded]
) -> Outcome:
    """Embed all inputs at once; where that is refused, each half by itself, down to the one at fault."""
    if not inputs:
        return [], []
    try:
        embedded = embed([x for _, x in inputs])
    except RegraftError as error:
        if len(inputs) == 1:
            row = inputs[0][0]
            return [], [Failed(row.id, row.seq, error.message)]
        half = len(inputs) // 2
        return _collect(_embed(inputs[:half], embed), _embed(inputs[half:], embed))
    sides = [None] * len(inputs) if embedded.side is None else list(embedded.side)
    rows = (row for row, _ in inputs)
    return [Moved(row.id, row.seq, v, s) for row, v, s in zip(rows, embedded.vectors, sides, strict=True)], []


def _collect(outcome: Outcome, more: Outcome) -> Outcome:
    outcome[0].extend(more[0])
    outcome[1].extend(more[1])
    return outcome
