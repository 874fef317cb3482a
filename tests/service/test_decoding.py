"""Whoever decodes images shares one bound on their memory, and holds one decoded image at a time."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from index.encoders.decoding import Decoder, PixelBudget
from index.version import Version
from service.settings import Settings
from staging.api.served import serving
from staging.states.working import SteppedWorker

ASKED = 3
SECONDS = 30.0


@pytest.fixture
def most(monkeypatch: pytest.MonkeyPatch) -> dict[Decoder, int]:
    """By the decoder: how many images it held at a time, at most."""
    most: dict[Decoder, int] = {}
    now: dict[Decoder, int] = {}
    counting, decoded = threading.Lock(), Decoder.decoded

    def count(decoder: Decoder, change: int) -> None:
        with counting:
            now[decoder] = now.get(decoder, 0) + change
            most[decoder] = max(most.get(decoder, 0), now[decoder])

    @contextmanager
    def counted(self: Decoder, data: bytes, budget: PixelBudget | None = None) -> Iterator[Any]:
        with decoded(self, data, budget) as image:
            count(self, 1)
            try:
                threading.Event().wait(0.001)
                yield image
            finally:
                count(self, -1)

    monkeypatch.setattr(Decoder, "decoded", counted)
    return most


@pytest.fixture
def server(versions: dict[str, Version], tmp_path: Path) -> Iterator[Any]:
    with serving(Settings(data=tmp_path, max_decoded_bytes=1)) as running:
        for name in ("v1", "v2"):
            running.register(versions[name])
        yield running


def test_every_path_waits_for_the_same_room_and_none_for_itself(
    server: Any, pictures: list[bytes], most: dict[Decoder, int]
) -> None:
    path = server.gallery("v1")
    stored = {f"i{n}": picture for n, picture in enumerate(pictures[:ASKED])}
    assert server.ingest(path, stored, label=1).status_code == 200
    entries = [{"image": str(n), "label": 1} for n in range(ASKED)]
    files = [("images", (str(n), picture)) for n, picture in enumerate(stored.values())]

    def evaluation(**params: Any) -> Any:
        data = {"entries": json.dumps(entries)}
        return server.http.post(f"{path}/evaluations", data=data, files=files, params=params)

    number = evaluation().json()["id"]
    server.deploy(path, "v2")
    curve = {"evaluation": number, "label": "label", "marks": 1}
    # Ids of its own each time: a gate may have drawn an item whose image another ingest is replacing.
    batches = itertools.count()

    def ingest() -> Any:
        batch = next(batches)
        return server.ingest(path, {f"more{batch}-{n}": picture for n, picture in enumerate(stored.values())})

    asks: list[Callable[[], Any]] = [
        ingest,
        lambda: server.query(path, *stored.values(), k=1),
        lambda: server.http.post(f"{path}/query", json={"items": list(stored), "k": 1}),
        lambda: evaluation(dry_run=True),
        lambda: server.http.post(f"{path}/gates", json={"version": "v1", "sample": 3}),
        lambda: server.http.post(f"{path}/gates", json={"version": "v1", "evaluation": number}),
        lambda: server.http.post(f"{path}/backfills", json={"curve": curve}),
    ]
    with ThreadPoolExecutor(2 * len(asks)) as threads:
        answers = list(threads.map(lambda ask: ask(), 2 * asks, timeout=SECONDS))

    refused = [answer.text for answer in answers if not answer.is_success and answer.status_code != 409]
    assert refused == []  # but for the second backfill of a gallery
    assert most == {server.runtime.decoder: 1}


def test_a_worker_has_a_bound_of_its_own(server: Any, pictures: list[bytes], most: dict[Decoder, int]) -> None:
    path = server.filled(pictures[:ASKED], "v1", "v2")
    started = server.http.post(f"{path}/backfills", json={"kind": "reencode"}).json()

    with closing(SteppedWorker(server.runtime.settings)) as worker:
        worker.drain()

    assert server.http.get(f"/backfills/{started['id']}").json()["done"] == ASKED
    assert list(most.values()) == [1, 1]
