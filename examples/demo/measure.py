"""Query the service and measure its answers; only `stored_state` and `chunks_in_hand` read its internals."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from examples.demo.pictures import Pictures
from index.evaluation.metrics import MEAN_AP, Retrieval, paired_bootstrap, retrieval_from_rankings
from regraft import Client

METRICS = {"cmc1": "cmc@1", "cmc5": "cmc@5", "map": MEAN_AP}
TOLERANCE = 1e-5
"""Largest difference of equal scores and stored numbers: the order of a float32 sum may change."""

State = dict[tuple[str, str, str], NDArray[np.float32]]
"""(item id, version, origin) -> stored embedding."""


@dataclass(frozen=True)
class Answer:
    """One consistent answer to all query images: the matches, best first, and their routes.

    `firsts`: the digit of each first match, from its metadata.
    """

    ids: Sequence[Sequence[str]]
    scores: Sequence[Sequence[float]]
    routes: frozenset[str]
    mix: Mapping[str, int]
    firsts: Sequence[int] = ()

    def first(self, queries: int) -> Answer:
        """The answer to the first `queries` queries only."""
        return replace(self, ids=self.ids[:queries], scores=self.scores[:queries])


def ask(client: Client, gallery: str, images: Sequence[bytes], k: int) -> Answer:
    """One request with all query images."""
    answer = client.query(gallery, images, k)
    matches = [result.matches for result in answer.results]
    return Answer(
        ids=[[m.id for m in row] for row in matches],
        # Probabilities depend on the score maps of a gallery; raw scores do not.
        scores=[[m.raw_score for m in row] for row in matches],
        routes=frozenset("+".join(route) or "same" for route in {tuple(m.route) for row in matches for m in row}),
        mix=answer.mix,
        firsts=[row[0].metadata["digit"] for row in matches],
    )


def measure(answer: Answer, pictures: Pictures) -> Retrieval:
    """CMC@1, CMC@5 and average precision over the permanent items; temporary ones are left out."""
    width = max(len(row) for row in answer.ids)
    ranked = np.full((len(answer.ids), width), -1)
    for row, ids in zip(ranked, answer.ids, strict=True):
        digits = [pictures.item_digits[i] for i in ids if i in pictures.item_digits]
        row[: len(digits)] = digits
    counts = np.bincount(list(pictures.item_digits.values()), minlength=10)
    return retrieval_from_rankings(ranked, pictures.query_digits, counts[pictures.query_digits])


def as_row(measured: Retrieval) -> dict[str, dict[str, float]]:
    """One row of the table: every metric with its bootstrap interval over queries."""
    return {name: dict(vars(measured.interval(metric))) for name, metric in METRICS.items()}


def difference(better: Retrieval, base: Retrieval) -> dict[str, dict[str, float]]:
    """Better - base over the same queries, with paired bootstrap intervals."""
    valid = better.valid & base.valid
    pairs = {name: (better.per_query(m)[valid], base.per_query(m)[valid]) for name, m in METRICS.items()}
    return {name: dict(vars(paired_bootstrap(a, b))) for name, (a, b) in pairs.items()}


def same_answers(a: Answer, b: Answer) -> bool:
    """Whether all queries have the same items with the same scores; the order of ties may differ."""
    return len(a.ids) == len(b.ids) and all(
        _same_ranking(dict(zip(ids, scores, strict=True)), dict(zip(b_ids, b_scores, strict=True)))
        for ids, scores, b_ids, b_scores in zip(a.ids, a.scores, b.ids, b.scores, strict=True)
    )


def _same_ranking(a: Mapping[str, float], b: Mapping[str, float]) -> bool:
    return a.keys() == b.keys() and all(abs(score - b[i]) <= TOLERANCE for i, score in a.items())


def stored_ids(client: Client, gallery: str) -> set[str]:
    """All item ids that the service lists."""
    ids: set[str] = set()
    cursor = None
    while True:
        page = client.items(gallery, limit=500, cursor=cursor)
        ids |= {item.id for item in page.items}
        cursor = page.next
        if cursor is None:
            return ids


def stored_state(data: Path, gallery: str) -> State:
    """The embeddings of a gallery's live items, read directly from SQL."""
    query = """
        select item.external_id, version.name, embedding.origin, embedding.vector
        from item join gallery on gallery.id = item.gallery_id
        join embedding on embedding.item_id = item.id join version on version.id = embedding.version_id
        where gallery.name = ? and not item.deleted
    """
    rows = _read(data, query, gallery)
    return {(i, version, origin): np.frombuffer(v, "<f4") for i, version, origin, v in rows}


def chunks_in_hand(data: Path, backfill: int) -> int:
    """Number of chunks of a backfill that a worker holds, which the API does not show."""
    query = "select count(*) from backfill_chunk where backfill_id = ? and state = 'leased'"
    return int(_read(data, query, backfill)[0][0])


def _read(data: Path, query: str, value: str | int) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(f"file:{data / 'regraft.db'}?mode=ro", uri=True)
    try:
        return connection.execute(query, [value]).fetchall()
    finally:
        connection.close()


def same_state(a: State, b: State) -> bool:
    """Whether both have the same items with the same embeddings."""
    return a.keys() == b.keys() and all(np.allclose(a[key], b[key], rtol=0, atol=TOLERANCE) for key in a)
