"""kill -9 of the real service and of real workers while clients write and a backfill runs."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np

from index.encoders.encoder import Encoder
from index.version_folder.folder import load_version
from regraft.connection import certificates
from service.store.vectors.codec import from_bytes
from staging.inputs.builders import image_bytes, make_image
from staging.waiting import until

V1, V2 = 1, 2


class Client:
    """Writes all the time, and knows which writes were acknowledged; a write that got no answer may or may not be."""

    def __init__(self, site: Any, picture: Callable[[int], bytes]) -> None:
        self.site = site
        self.picture = picture
        self.live = {f"i{n}": n for n in range(48)}
        self.deleted: set[str] = set()
        self.unsure: set[str] = set()
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.write, daemon=True)
        self.draw = random.Random(0)

    def write(self) -> None:
        with httpx.Client(base_url=self.site.http.base_url, timeout=20, verify=certificates()) as http:
            number = 100
            while not self.stop.wait(0.1):
                number += 1
                chosen = self.draw.choice(sorted(self.live))
                try:
                    if number % 4 == 0:
                        self.delete(http, chosen)
                    else:
                        self.store(http, f"new{number}" if number % 4 == 1 else chosen, number)
                except httpx.ConnectError:
                    continue  # nobody heard it
                except httpx.TransportError:
                    self.unsure.add(f"new{number}" if number % 4 == 1 else chosen)

    def store(self, http: httpx.Client, name: str, number: int) -> None:
        listed = json.dumps([{"id": name, "metadata": {}, "image": "a"}])
        answer = http.post(
            "/galleries/g/items", data={"items": listed}, files=[("images", ("a", self.picture(number)))]
        )
        assert answer.json()["stored"] == 1, answer.text
        self.live[name] = number

    def delete(self, http: httpx.Client, name: str) -> None:
        answer = http.delete(f"/galleries/g/items/{name}")
        assert answer.status_code in {204, 404}, answer.text
        assert answer.status_code == 204 or name in self.unsure
        self.deleted.add(name)
        del self.live[name]

    def sure(self) -> dict[str, int]:
        """Items that must be there, and the number of their picture."""
        return {name: number for name, number in self.live.items() if name not in self.unsure}


def test_nothing_acknowledged_is_lost_and_nothing_deleted_returns(site: Any) -> None:
    server, workers = site.server(), [site.worker(), site.worker()]
    number = site.http.post("/galleries/g/backfills", json={"chunk_size": 3, "rate": 25}).json()["id"]
    client = Client(site, lambda n: image_bytes(make_image(n % 5, n)))
    client.thread.start()

    until(lambda: handled(site, number) > 5, workers[0])
    workers[0].kill()
    until(lambda: handled(site, number) > 12, workers[1])
    server.kill()
    server.wait()
    server = site.server()
    workers.append(site.worker())
    # How much the client gets done meanwhile depends on the machine: wait for it too.
    until(lambda: handled(site, number) > 20 and len(client.deleted) > 2, workers[1])
    server.kill()
    client.stop.set()
    client.thread.join()
    site.server()
    until(lambda: site.backfill(number).state == "done", workers[1])

    state, sure = site.state("g"), client.sure()
    assert len(sure) > 20
    assert len(client.deleted) > 2
    assert set(sure) <= set(state) <= set(sure) | client.unsure
    assert not (client.deleted - set(client.live) - client.unsure) & set(state)
    assert {active for active, _ in state.values()} == {V2}
    check_vectors(site, state, sure, make_image)
    shown = site.http.get("/galleries/g").json()
    assert (shown["items"], shown["mix"]) == (len(state), {"v2": len(state)})
    assert site.backfill(number).failed == 0
    for name, number in sure.items():
        image = site.http.get(f"/galleries/g/items/{name}/image")
        assert image.content == image_bytes(make_image(number % 5, number))


def handled(site: Any, number: int) -> int:
    row = site.backfill(number)
    return int(row.done + row.skipped)


def check_vectors(site: Any, state: dict[str, Any], sure: dict[str, int], make_image: Callable[..., Any]) -> None:
    """Each item holds the embedding of the picture that was acknowledged last."""
    encoder = Encoder(load_version(site.settings.versions / "v2"))
    expected = encoder.encode([make_image(n % 5, n) for n in sure.values()]).vectors
    held = from_bytes([state[name][1][V2][1] for name in sure], 6)
    np.testing.assert_allclose(held, expected, atol=1e-5)


def test_a_rollback_during_a_backfill_is_final_and_going_forward_again_resumes_where_it_was(site: Any) -> None:
    before = {name: active for name, (active, _) in site.state("g").items()}
    server, workers = site.server(), [site.worker(), site.worker()]
    number = site.http.post("/galleries/g/backfills", json={"chunk_size": 3, "rate": 10}).json()["id"]
    until(lambda: site.backfill(number).done > 8, workers[0])

    back = site.http.post("/galleries/g/rollback").json()
    at_once = site.state("g")
    site.http.post("/galleries/h/backfills", json={})
    until(lambda: site.mix("h") == {V2: 48}, workers[0])

    assert back["activated"] == site.backfill(number).done
    assert site.backfill(number).state == "cancelled"
    assert {name: active for name, (active, _) in at_once.items()} == before
    assert site.state("g") == at_once
    server.kill()
    server.wait()
    site.server()
    forward = site.http.post("/galleries/g/deployments", json={"version": "v2"}).json()
    assert forward["activated"] == back["activated"]
    assert site.http.get("/galleries/g").json()["mix"] == {"v1": 48 - back["activated"], "v2": back["activated"]}


def test_the_service_answers_every_query_while_workers_move_its_items_and_die(site: Any) -> None:
    """Every query finds all items exactly once, whatever share of them has moved."""
    site.server()
    doomed = site.doomed_worker("written", 4)
    number = site.http.post("/galleries/g/backfills", json={"chunk_size": 2, "rate": 25}).json()["id"]
    shares = set()

    def ask() -> bool:
        files = [("images", ("q", image_bytes(make_image(3, 999))))]
        answer = site.http.post("/galleries/g/query", data={"k": "48"}, files=files)
        assert answer.status_code == 200, answer.text
        found = [match["id"] for match in answer.json()["results"][0]["matches"]]
        assert sorted(found) == sorted(f"i{n}" for n in range(48))
        assert answer.json()["degraded"] == []
        assert sum(answer.json()["mix"].values()) == 48
        shares.add(answer.json()["mix"].get("v2", 0))
        return site.backfill(number).state == "done" and 48 in shares

    until(lambda: ask() or doomed.poll() is not None)
    until(ask, site.worker())

    assert len(shares) > 5
    assert min(shares) < 10
