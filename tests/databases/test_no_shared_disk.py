"""Two machines with a PostgreSQL and an S3 between them and no disk in common: what one accepts, the other serves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from service.doctor.examination import Doctor
from service.http.app import create_app
from service.runtime import running
from service.settings import Settings
from service.store.image_store.object_store import open_store
from staging.api.served import serving
from staging.external.s3 import ObjectStore, reachable_object_store
from staging.inputs.builders import image_bytes, make_image, make_version, zip_version
from staging.states.working import work

ITEMS = 24

pytestmark = pytest.mark.parametrize("dialect", ["postgresql"], indirect=True)


@pytest.fixture(scope="module")
def s3() -> Iterator[ObjectStore]:
    with reachable_object_store() as emulator:
        yield emulator


@pytest.fixture
def bucket(s3: ObjectStore) -> str:
    return s3.bucket()


@pytest.fixture
def machines(settings: Settings, bucket: str, tmp_path: Path) -> list[Settings]:
    return [settings.model_copy(update={"data": tmp_path / name, "blobs_url": bucket}) for name in ("a", "b", "c")]


@pytest.fixture
def services(machines: list[Settings]) -> Iterator[list[TestClient]]:
    with ExitStack() as stack:
        made = [TestClient(create_app(one), base_url="http://127.0.0.1/v1") for one in machines[:2]]
        yield [stack.enter_context(http) for http in made]


def found(http: TestClient, picture: bytes) -> list[str]:
    asked = http.post("/galleries/g/query", data={"k": "3"}, files=[("images", ("q", picture))])
    assert asked.status_code == 200, asked.text
    assert asked.json()["degraded"] == []
    return [match["id"] for match in asked.json()["results"][0]["matches"]]


def test_versions_edges_and_images_reach_every_machine(
    services: list[TestClient], machines: list[Settings], tmp_path: Path
) -> None:
    here, there = services
    v1 = make_version(tmp_path / "v1", "v1", 4)
    v2 = make_version(tmp_path / "v2", "v2", 6, drift=0.1)
    v3 = make_version(tmp_path / "v3", "v3", 6, edges=[(v2, "identity", 0.9)])
    pictures = [image_bytes(make_image(n % 5, n)) for n in range(ITEMS)]

    def ok(answer: Any, *codes: int) -> Any:
        assert answer.status_code in (codes or (200, 201, 202)), answer.text
        return answer

    for http, version in ((here, v1), (there, v2), (here, v3)):  # an edge's old version came on the other machine
        ok(http.post("/versions", files={"archive": zip_version(version.folder)}))
    ok(here.post("/galleries", json={"name": "g"}))
    ok(there.post("/galleries/g/deployments", json={"version": "v1"}))
    for n, picture in enumerate(pictures):
        items = f'[{{"id": "i{n}", "image": "a", "metadata": {{"label": {n % 5}}}}}]'
        ok(services[n % 2].post("/galleries/g/items", data={"items": items}, files=[("images", ("a", picture))]))
    assert found(here, pictures[3]) == found(there, pictures[3])
    assert there.get("/galleries/g/items/i0/image").content == pictures[0]

    fit = {"new": "v2", "old": "v1", "gallery": "g", "kind": "procrustes", "embed": ITEMS, "label": "label"}
    ok(there.post("/edges:fit", json=fit))
    ok(here.post("/galleries/g/deployments", json={"version": "v2"}))
    assert found(here, pictures[3]) == found(there, pictures[3])
    ok(there.post("/galleries/g/backfills", json={"kind": "reencode"}))
    work(machines[2])  # a worker on a third machine, which has seen no version yet
    for http in services:
        http.app.state.runtime.replica.refresh(1)  # type: ignore[attr-defined]
        assert http.get("/galleries/g").json()["mix"] == {"v2": ITEMS}
        assert http.get("/health/ready").json()["problems"] == []

    ok(here.delete("/versions/v3", params={"confirm": "v3"}), 204)
    other = make_version(tmp_path / "other", "v3", 5, seed=3)  # other content by a name that was used before
    ok(here.post("/versions", files={"archive": zip_version(other.folder)}))
    assert there.get("/versions/v3").json()["dim"] == 5
    assert there.get("/versions/v3").json()["problem"] is None


@pytest.mark.parametrize("harm", ["cut", "gone"])
def test_the_doctor_stores_folders_again_that_other_machines_would_miss(
    services: list[TestClient], machines: list[Settings], tmp_path: Path, harm: str
) -> None:
    runtime = services[0].app.state.runtime  # type: ignore[attr-defined]
    v1 = make_version(tmp_path / "v1", "v1", 4)
    assert services[0].post("/versions", files={"archive": zip_version(v1.folder)}).status_code == 201
    store, root = open_store(machines[0].blobs_url)
    ((key, _),) = runtime.blobs.all_folders()
    content = store.cat_file(f"{root}/{key}")
    store.rm_file(f"{root}/{key}")
    if harm == "cut":
        store.pipe_file(f"{root}/{key}", content[: len(content) // 2])
    doctor = Doctor(machines[0], runtime.database)

    assert {f.code: f.examples for f in doctor.examine()} == {"folder_missing": ["v1"], "version_unused": ["v1"]}
    doctor.examine(fix=True)
    assert {f.code for f in doctor.examine()} == {"version_unused"}
    with running(machines[2]) as third:
        assert third.registry.named("v1").problem == ""


def test_the_doctor_moves_the_folders_of_a_disk_after_its_images(
    machines: list[Settings], bucket: str, tmp_path: Path
) -> None:
    """As docs/deployment.md says: registering versions again would leave out the edges that were fitted."""
    v1, v2 = make_version(tmp_path / "v1", "v1", 4), make_version(tmp_path / "v2", "v2", 4, drift=0.1)
    on_disk = machines[0].model_copy(update={"blobs_url": f"file://{tmp_path}/blobs"})
    with serving(on_disk) as served:
        for version in (v1, v2):
            assert served.register(version).status_code == 201
        path = served.filled([image_bytes(make_image(n % 5, n)) for n in range(ITEMS)])
        fit = {"new": "v2", "old": "v1", "gallery": path.rpartition("/")[2], "kind": "procrustes", "embed": ITEMS}
        assert served.http.post("/edges:fit", json=fit).status_code == 201
    store, root = open_store(bucket)
    store.put(f"{tmp_path}/blobs/", f"{root}/", recursive=True)

    with running(machines[0]) as moved:
        assert [f.code for f in Doctor(machines[0], moved.database).examine(fix=True) if f.fixed] == ["folder_missing"]

    with running(machines[1]) as another:
        assert [(edge.edge.key, edge.problem) for edge in another.registry.edges()] == [(("v2", "v1", "matrix"), "")]
        assert [version.problem for version in another.registry.all()] == ["", ""]
        assert len(list(another.blobs.all())) == ITEMS
