"""A backfill of a gallery that lies in an engine: workers and the engine's server are killed in the middle of it."""

from __future__ import annotations

import shutil
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.settings import Settings
from staging.external.doomed_engine import DoomedEngine
from staging.inputs.builders import image_bytes, make_image
from staging.processes.site import LEASE_SECONDS, Site
from staging.random_operations.engine_life import EngineLoad
from staging.waiting import until

V1, V2, ITEMS = 1, 2, 48
QUERIES = np.random.default_rng(0).normal(size=(5, 6)).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_a_backfill_whose_worker_and_engine_are_killed_ends_complete(
    engine_server: tuple[str, Any, dict[str, str]], template: Path, tmp_path: Path, how: str
) -> None:
    kind, running, setting = engine_server
    shutil.copytree(template, tmp_path / "data")
    settings = Settings(data=tmp_path / "data", lease_seconds=LEASE_SECONDS, **setting)
    engine = DoomedEngine(running)
    with closing(Site(settings.data, settings)) as site:
        service = site.server()
        site.http.patch("/galleries/g", json={"index": {"kind": kind}}).raise_for_status()
        until(lambda: lag(site) == {("v1", "encoded"): 0}, service)
        pictures = [image_bytes(make_image(n, n)) for n in range(5)]
        load = EngineLoad(engine, f"{site.http.base_url}galleries/g/query", pictures, 3, pause=0.05)
        with load.running():
            number = site.start_backfill("g", rate=24)
            worker = site.worker()
            until(lambda: site.backfill(number).done >= 12, worker)
            engine.strike(how, 0.0)
            worker.send_signal(signal.SIGKILL)
            worker.wait(30)
            # Before what is left there moves away from it: a query waits for two seconds until the engine is given up.
            until(lambda: load.lacking, service)
            other = site.worker()
            until(lambda: site.backfill(number).done >= 30, other)
            engine.bring_back()
            until(lambda: site.backfill(number).state == "done", other)
            until(lambda: lag(site) == dict.fromkeys([("v1", "encoded"), ("v2", "encoded")], 0), service)
            load.wait()
        row = site.backfill(number)
        assert (row.done, row.skipped, row.failed) == (ITEMS, 0, 0)
        assert site.mix("g") == {V2: ITEMS}
        assert load.wrong == []
        told = site.http.post("/galleries/g/query", json={"version": "v2", "embeddings": QUERIES.tolist(), "k": 10})
        held = {name: np.frombuffer(held[V2][1], "<f4") for name, (_, held) in site.state("g").items()}
        rows = np.stack(list(held.values()))
        for query, result in zip(QUERIES, told.json()["results"], strict=True):
            scores = dict(zip(held, (rows @ (query / np.linalg.norm(query))).tolist(), strict=True))
            found = {match["id"]: match["raw_score"] for match in result["matches"]}
            assert found == pytest.approx({name: scores[name] for name in found}, abs=1e-5)
            assert sorted(found.values()) == pytest.approx(sorted(scores.values())[-10:], abs=1e-5)


def lag(site: Site) -> dict[tuple[str, str], int]:
    """By version and origin how far a collection is behind, or how many rows it does not have."""
    told = site.http.get("/galleries/g").json()["collections"]
    return {(one["version"], one["origin"]): one["lag"] + one["here"] for one in told}
