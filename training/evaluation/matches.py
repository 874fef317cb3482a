"""A few queries with what each version finds first, as small pictures inside an HTML page."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from index.evaluation.metrics import Compared, comparable, costs
from training.data.images import Data, ImageSet
from training.evaluation.matrix import Evaluation

QUERIES, FIRST, PIXELS = 6, 5, 72


def match_table(measured: Evaluation, new: str, old: str, data: Data) -> Iterator[str]:
    """Queries as rows, their first matches under old/old and new/old beside them; right ones are framed green."""
    before, after = measured.compared[old, old], measured.compared[new, old]
    rows = choose_queries(measured, new, old)
    yield f"<h2>First matches, {escape(old)}/{escape(old)} and {escape(new)}/{escape(old)}</h2>"
    yield (
        "<p>Queries whose first match changes come first: those that become right, then those that become wrong. "
        "Green: of the query's class; orange: of another.</p>"
    )
    yield '<table class="matches"><thead><tr><th>query</th>'
    yield f"<th>{escape(old)}/{escape(old)}</th><th>{escape(new)}/{escape(old)}</th></tr></thead><tbody>"
    for row in rows:
        itself = row if data.same else -1
        cells = "".join(
            f"<td>{_found(first_items(compared, row, itself), data.query.labels[row], data)}</td>"
            for compared in (before, after)
        )
        yield f"<tr><td>{_picture(data.query, row, data, 'query')}</td>{cells}</tr>"
    yield "</tbody></table>"


def choose_queries(measured: Evaluation, new: str, old: str) -> list[int]:
    """Queries to show: two thirds at most that the upgrade mends, then that it breaks, then the first others."""
    was, now = (measured.cells[pair].retrieval for pair in ((old, old), (new, old)))
    valid = was.valid & now.valid
    mended = np.flatnonzero(valid & ~was.hits[1] & now.hits[1])[: 2 * QUERIES // 3]
    broken = np.flatnonzero(valid & was.hits[1] & ~now.hits[1])[: QUERIES // 3]
    rest = np.flatnonzero(valid & (was.hits[1] == now.hits[1]))
    return [int(row) for row in np.concatenate([mended, broken, rest])[:QUERIES]]


def first_items(compared: Compared, row: int, itself: int, k: int = FIRST) -> NDArray[np.int64]:
    """The at most k items that one query finds first, without the one that is its own image (-1: there is none)."""
    queries, items = comparable(compared)
    cost_N = costs(queries[row : row + 1], items, compared.space)[0].copy()
    if itself >= 0:
        cost_N[itself] = np.inf
    return np.argsort(cost_N, kind="stable")[: min(k, len(cost_N) - (itself >= 0))]


def _found(items: Sequence[int] | NDArray[np.int64], label: int, data: Data) -> str:
    return "".join(
        _picture(data.gallery, int(item), data, "right" if data.gallery.labels[item] == label else "wrong")
        for item in items
    )


def _picture(images: ImageSet, row: int, data: Data, mark: str) -> str:
    image = images.images[row].convert("RGB")
    image.thumbnail((PIXELS, PIXELS))
    scale = max(1, PIXELS // max(image.size))
    image = image.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST)
    stream = io.BytesIO()
    image.save(stream, "PNG", optimize=True)
    label = int(images.labels[row])
    name = escape(data.names[label] if data.names else str(label), quote=True)
    source = base64.b64encode(stream.getvalue()).decode()
    return f'<img class="{mark}" alt="{name}" title="{name}" src="data:image/png;base64,{source}">'
