"""API replicas on one PostgreSQL behind a proxy, real processes: one is killed, one ends, nobody who asks is failed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.settings import Settings
from staging.inputs.builders import image_bytes, make_image, make_version, zip_version
from staging.processes.load import Load
from staging.processes.proxy import Proxy, proxied
from staging.processes.site import Site
from staging.waiting import until

ITEMS, CLIENTS, K = 24, 4, 5

pytestmark = pytest.mark.parametrize("dialect", ["postgresql"], indirect=True)


@pytest.fixture
def sites(settings: Settings) -> Iterator[list[Site]]:
    settings.data.mkdir(parents=True)
    with ExitStack() as stack:
        yield [stack.enter_context(closing(Site(settings.data, settings))) for _ in range(2)]


@pytest.fixture
def proxy(sites: list[Site]) -> Iterator[Proxy]:
    with proxied([site.port for site in sites]) as made:
        yield made


@pytest.fixture
def pictures() -> list[bytes]:
    return [image_bytes(make_image(n % 5, n)) for n in range(ITEMS)]


@pytest.fixture
def http(proxy: Proxy) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{proxy.url}/v1", timeout=30) as made:
        yield made


def fill(http: httpx.Client, folder: Path, pictures: list[bytes]) -> None:
    """Through the proxy, a request here and the next there: each shows what the other one acknowledged."""
    v1 = make_version(folder / "v1", "v1", 4)
    assert http.post("/versions", files={"archive": zip_version(v1.folder)}).status_code == 201
    assert http.post("/galleries", json={"name": "g"}).status_code == 201
    assert http.post("/galleries/g/deployments", json={"version": "v1"}).status_code == 201
    for n, picture in enumerate(pictures):
        data, files = {"items": f'[{{"id": "i{n}", "image": "a"}}]'}, [("images", ("a", picture))]
        assert http.post("/galleries/g/items", data=data, files=files).json()["stored"] == 1
        found = http.post("/galleries/g/query", data={"k": "1"}, files=[("images", ("q", picture))]).json()
        assert found["results"][0]["matches"][0]["id"] == f"i{n}"


def test_a_replica_may_be_killed_or_stopped_under_load(
    sites: list[Site], proxy: Proxy, http: httpx.Client, pictures: list[bytes], tmp_path: Path
) -> None:
    one, other = (site.server() for site in sites)
    fill(http, tmp_path, pictures)

    def load() -> Load:
        return Load(f"{proxy.url}/v1/galleries/g/query", pictures, K, clients=CLIENTS)

    with (killed := load()).running():
        killed.wait(40)
        while_dying = proxy.kill(one)
        killed.wait(40)
        one = sites[0].server()
        killed.wait(40)
    assert len(killed.wrong) == len(proxy.lost) <= while_dying + CLIENTS, killed.wrong
    lost = list(proxy.lost)

    with (ended := load()).running():
        for number, process in enumerate((one, other)):
            ended.wait(40)
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0, sites[number].log(process)
            ended.wait(40)
            sites[number].server()
    assert (ended.wrong, proxy.lost) == ([], lost)


def test_one_that_starts_is_ready_once_it_follows_the_database(
    sites: list[Site], http: httpx.Client, pictures: list[bytes], tmp_path: Path
) -> None:
    sites[0].server()
    fill(http, tmp_path, pictures)
    late = sites[1].launch("-m", "regraft", "serve", "--workers", "0", "--port", str(sites[1].port))
    answers: list[Any] = []

    def ready() -> bool:
        try:
            answers.append(sites[1].http.get("/health/ready"))
        except httpx.TransportError:
            return False
        return bool(answers[-1].status_code == 200)

    until(ready, late)
    asked = sites[1].http.post("/galleries/g/query", data={"k": "1"}, files=[("images", ("q", pictures[-1]))])
    assert asked.json()["results"][0]["matches"][0]["id"] == f"i{ITEMS - 1}"
