"""Curves of backfills, and naive loops to compare them with."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from sqlalchemy import exists, select

from index.encoders.image import decode_image
from service.store.tables import embedding, item
from staging.api.served import Served

WAIT = 60.0


def group(number: int) -> int:
    """A label that is almost unrelated to an image, so that no metric is 1."""
    return number * number % 7 // 2


def deploy(served: Served, path: str, version: str) -> None:
    deployed = served.http.post(f"{path}/deployments", json={"version": version})
    assert deployed.status_code == 201, deployed.text


def start(served: Served, path: str, curve: dict[str, Any], **fields: Any) -> int:
    return served.backfill(path, **{"chunk_size": 5, "curve": curve, **fields})


def turn(served: Served, number: int, action: str) -> None:
    assert served.http.post(f"/backfills/{number}/{action}").status_code == 200


def curve_of(served: Served, number: int) -> dict[str, Any]:
    return dict(served.http.get(f"/backfills/{number}").json()["curve"])


def wait_for(served: Served, number: int, holds: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Wait until the curve fulfils a condition, because it is measured after the backfill; returns the curve."""
    deadline = time.monotonic() + WAIT
    while not holds(curve := curve_of(served, number)):
        assert time.monotonic() < deadline, curve
        time.sleep(0.01)
    return curve


def ended(curve: dict[str, Any]) -> bool:
    return bool(curve["state"] != "measuring")


class Loops:
    """The same metrics by loops in float64 over the present state of the items in SQL."""

    def __init__(self, served: Served, path: str, pictures: Sequence[bytes], new: str = "new") -> None:
        self.served, self.name, self.new = served, path.rpartition("/")[2], new
        images = [decode_image(picture, max_pixels=10_000) for picture in pictures]
        encoders = [served.runtime.registry.named(version).encoder() for version in ("v1", new)]
        self.by_old, self.by_new = (one.encode(images).vectors.astype(np.float64) for one in encoders)

    def moved(self) -> dict[int, bool]:
        """Number of the image -> whether its item is in the new version, for live items."""
        runtime = self.served.runtime
        gallery, new = runtime.replica.find(self.name).id, runtime.registry.named(self.new).id
        held = exists().where(embedding.c.item_id == item.c.id, embedding.c.version_id == new)
        with runtime.database.lookup() as connection:
            mine = select(item.c.external_id, held).where(item.c.gallery_id == gallery, ~item.c.deleted)
            return {int(i[1:]): moved for i, moved in connection.execute(mine)}

    def ranking(self, query: int, *, itself: bool) -> list[int]:
        first = self.by_new[query][:4] / np.linalg.norm(self.by_new[query][:4])
        scores = {
            n: float(self.by_new[query] @ self.by_new[n]) if new else float(first @ self.by_old[n])
            for n, new in self.moved().items()
            if itself or n != query
        }
        return sorted(scores, key=lambda n: -scores[n])

    def value(self, metric: str, queries: Sequence[int], *, itself: bool = False) -> float:
        return float(np.mean([v for q in queries if (v := self._one(metric, q, queries, itself)) is not None]))

    def _one(self, metric: str, query: int, queries: Sequence[int], itself: bool) -> float | None:
        ranking = self.ranking(query, itself=itself)
        if metric.startswith("recall@"):
            k = int(metric.removeprefix("recall@"))
            near = sorted((n for n in queries if n != query), key=lambda n: -float(self.by_new[query] @ self.by_new[n]))
            return len(set(near[:k]) & set([n for n in ranking if n in queries][:k])) / k
        right = [group(n) == group(query) for n in ranking]
        if not any(right):
            return None
        if metric == "mAP@1.0":
            return float(np.mean([sum(right[: r + 1]) / (r + 1) for r, hit in enumerate(right) if hit]))
        return float(any(right[: int(metric.removeprefix("cmc@"))]))


def evaluation(served: Served, path: str, pictures: list[bytes], asking: Sequence[int]) -> int:
    entries = [{"label": group(n), "image": f"{n}.png"} for n in asking]
    files = [("images", (f"{n}.png", pictures[n])) for n in asking]
    made = served.http.post(f"{path}/evaluations", data={"name": "e", "entries": json.dumps(entries)}, files=files)
    assert made.status_code == 201, made.text
    return int(made.json()["id"])
