"""What examples/kubernetes starts, started here with its environment: the story of an upgrade, by real processes.

A PostgreSQL, an emulator of S3, two API processes behind a proxy and two workers; each has a disk of its own. Vectors
lie in memory, or in one of the servers that the compose file has profiles for: a database of that PostgreSQL with
pgvector, and Milvus's test server. The rows are brought there by whichever API process holds the lease.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from index.engines.config import IndexKind
from regraft.connection import certificates
from service.replica.engines import Engines
from service.settings import Settings
from service.store.database.connections import Database
from service.store.leases.engines import engine_leases
from staging.external.postgres import Server
from staging.external.s3 import ObjectStore, object_store
from staging.inputs.builders import image_bytes, make_image, make_version, zip_version
from staging.processes.forked import ROOT, Forked, environment
from staging.processes.load import Load
from staging.processes.ports import free_port
from staging.processes.proxy import proxied
from staging.waiting import until

KEY = "a-key-of-the-stack"
OPENED: dict[str, Any] = {"verify": certificates(), "headers": {"Authorization": f"Bearer {KEY}"}}
ITEMS, CLIENTS, K = 40, 2, 5

pytestmark = pytest.mark.parametrize("dialect", ["postgresql"], indirect=True)


def manifest(name: str) -> dict[str, Any]:
    (first, *_) = yaml.safe_load_all((ROOT / "examples" / "kubernetes" / f"{name}.yaml").read_text())
    return dict(first)


class Stack:
    """Processes by the commands of the manifests, with the variables that they are given."""

    def __init__(self, folder: Path, database_url: str, store: ObjectStore, engines: Mapping[str, str]) -> None:
        """`engines`: where the servers of engines are, as the compose file tells its processes."""
        self.folder = folder
        self.variables = {
            **manifest("config")["data"],
            **manifest("secret")["stringData"],
            **store.environment,
            "REGRAFT_HOST": "127.0.0.1",
            "REGRAFT_DATABASE_URL": database_url,
            "REGRAFT_BLOBS_URL": store.bucket(),
            "REGRAFT_API_KEY": KEY,
            "REGRAFT_LEASE_SECONDS": "0.5",
            **engines,
        }
        self.processes: list[Forked] = []

    def start(self, name: str, data: str, port: int = 0) -> Forked:
        """A pod's process, behind those that come to their end before it."""
        pod = manifest(name)["spec"]["template"]["spec"]
        variables = environment(
            **{**self.variables, "REGRAFT_DATA": str(self.folder / data), "REGRAFT_PORT": str(port)}
        )
        for before in pod.get("initContainers", []):
            log = self.folder / f"{data}-{before['name']}.log"
            assert Forked(["-m", *before["command"]], variables, log).wait(60) == 0, log.read_text()
        log = self.folder / f"{data}.log"
        self.processes.append(Forked(["-m", *pod["containers"][0]["command"]], variables, log))
        return self.processes[-1]

    def log(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()}" for path in sorted(self.folder.glob("*.log")))

    def ready(self, process: Forked, port: int) -> None:
        """What the readiness probe waits for."""
        place = f"http://127.0.0.1:{port}/v1/health/ready"

        def answers() -> bool:
            try:
                return httpx.get(place, **OPENED).status_code == 200
            except httpx.TransportError:
                return False

        until(answers, process, said=self.log)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


COMPOSED = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["x-regraft"]["environment"]


@pytest.fixture
def elsewhere(kind: str, server: Server, request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """The server that galleries of a kind lie in, as a variable of the compose file."""
    found = {}
    if kind == "pgvector":
        found = {"REGRAFT_PGVECTOR_URL": server.create()}
    elif kind == "milvus":
        found = {"REGRAFT_MILVUS_URI": request.getfixturevalue("milvus_server").uri}
    assert found.keys() <= COMPOSED.keys()
    yield found
    if kind == "pgvector":
        server.drop(found["REGRAFT_PGVECTOR_URL"])


@pytest.fixture
def stack(settings: Settings, elsewhere: dict[str, str], tmp_path: Path) -> Iterator[Stack]:
    with object_store() as store, closing(Stack(tmp_path, settings.database_url, store, elsewhere)) as made:
        yield made


def lies_in(settings: Settings, kind: str) -> set[str]:
    """The versions that the gallery has in an engine, of which one process at a time may write; none in memory."""
    with (
        closing(Database(settings.database_url)) as database,
        closing(Engines(settings)) as engines,
        database.lookup() as connection,
    ):
        leases = engine_leases(connection)
        return {version for one in leases for version, _ in engines.get(IndexKind(kind)).places(one.name)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["auto", "pgvector", "milvus"])
def test_the_story_of_an_upgrade_on_the_stack(
    kind: str, stack: Stack, settings: Settings, elsewhere: dict[str, str], tmp_path: Path
) -> None:
    v1 = make_version(tmp_path / "v1", "v1", 4)
    v2 = make_version(tmp_path / "v2", "v2", 6, edges=[(v1, "truncate")])
    pictures = [image_bytes(make_image(n % 5, n)) for n in range(ITEMS)]
    ports = [free_port(), free_port()]
    with ExitStack() as opened:
        apis = [stack.start("api", f"api{n}", port) for n, port in enumerate(ports)]
        for process, port in zip(apis, ports, strict=True):
            stack.ready(process, port)
        workers = [stack.start("worker", f"worker{n}") for n in range(2)]
        proxy = opened.enter_context(proxied(ports))
        http = opened.enter_context(httpx.Client(base_url=f"{proxy.url}/v1", timeout=60, **OPENED))

        def ok(answer: httpx.Response) -> Any:
            assert answer.status_code < 300, f"{answer.text}\n{stack.log()}"
            return answer.json()

        for version in (v1, v2):
            ok(http.post("/versions", files={"archive": zip_version(version.folder)}))
        ok(http.post("/galleries", json={"name": "g", "index": {"kind": kind}}))
        ok(http.post("/galleries/g/deployments", json={"version": "v1"}))
        for n, picture in enumerate(pictures):
            items = f'[{{"id": "i{n}", "image": "a", "metadata": {{"label": {n % 5}}}}}]'
            assert ok(http.post("/galleries/g/items", data={"items": items}, files=[("images", ("a", picture))]))[
                "stored"
            ]

        def answers() -> Any:
            files = [("images", ("q", picture)) for picture in pictures[:4]]
            return [
                result["matches"]
                for result in ok(http.post("/galleries/g/query", data={"k": "5"}, files=files))["results"]
            ]

        engines = settings.model_copy(update={n.removeprefix("REGRAFT_").lower(): v for n, v in elsewhere.items()})
        until(lambda: kind == "auto" or lies_in(engines, kind) == {"v1"}, *apis, said=stack.log)
        before = answers()
        load = Load(f"{proxy.url}/v1/galleries/g/query", pictures, K, clients=CLIENTS, key=KEY)
        with load.running():
            ok(http.post("/galleries/g/gates", json={"version": "v2", "label": "label"}))
            ok(http.post("/galleries/g/deployments", json={"version": "v2"}))
            load.wait()
            number = ok(http.post("/galleries/g/backfills", json={"chunk_size": 2, "rate": 8}))["id"]
            until(lambda: ok(http.get(f"/backfills/{number}"))["done"] > 2, *apis, *workers, said=stack.log)
            waiting = httpx.get(f"{proxy.url}/metrics", headers=dict(http.headers)).text
            assert "\nregraft_backfill_items_waiting " in waiting
            workers[0].kill()
            while_dying = proxy.kill(apis[0])
            load.wait()
            apis[0] = stack.start("api", "api0", ports[0])
            stack.ready(apis[0], ports[0])
            apis[1].send_signal(signal.SIGTERM)
            assert apis[1].wait(30) == 0
            apis[1] = stack.start("api", "api1-again", ports[1])  # on a new disk
            stack.ready(apis[1], ports[1])
            until(lambda: ok(http.get(f"/backfills/{number}"))["state"] == "done", *apis, workers[1], said=stack.log)
            load.wait()
            done = ok(http.get(f"/backfills/{number}"))
            assert (done["total"], done["done"], done["failed"]) == (ITEMS, ITEMS, 0)
            until(lambda: kind == "auto" or "v2" in lies_in(engines, kind), *apis, said=stack.log)
            for _ in range(2):
                assert ok(http.get("/galleries/g"))["mix"] == {"v2": ITEMS}
            ok(http.post("/galleries/g/rollback"))
        assert answers() == before
        assert len(load.wrong) == len(proxy.lost) <= while_dying + CLIENTS, load.wrong
        assert "Traceback" not in stack.log()
        assert {path.name for path in (stack.folder / "api1-again" / "versions").iterdir()} == {"v1", "v2"}
