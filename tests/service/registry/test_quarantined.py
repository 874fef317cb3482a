"""A version or edge whose files changed on disk is quarantined: it is named and not used, and all the rest goes on."""

from __future__ import annotations

import io
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest

from index.encoders.decoding import Decoder
from index.errors import RegraftError
from index.version import Version
from service.backfills.embedder import Embedder
from service.errors import EdgeBroken
from service.registry.registry import Registry
from service.runtime import running
from service.settings import Settings
from service.store.blob_references import open_blobs
from service.store.database.connections import Database
from staging.api.served import problem, serving
from staging.inputs.builders import make_version, zip_version


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, pictures: list[bytes]) -> Path:
    """Gallery `whole` of v1; `mixed` of v1 and then v2, which is current; v3 only registered, with an edge to v2."""
    root = tmp_path_factory.mktemp("aside")
    v1 = make_version(root / "v1", "v1", 4)
    v2 = make_version(root / "v2", "v2", 6, edges=[(v1, "truncate")])
    v3 = make_version(root / "v3", "v3", 6, seed=3, edges=[(v2, "matrix")])
    with serving(Settings(data=root / "data")) as running:
        for version in (v1, v2, v3):
            assert running.register(version).status_code == 201
        for name in ("whole", "mixed"):
            assert running.http.post("/galleries", json={"name": name}).status_code == 201
            deploy(running, name, "v1")
            running.ingest(f"/galleries/{name}", {f"i{n}": picture for n, picture in enumerate(pictures[:4])})
        deploy(running, "mixed", "v2")
        running.ingest("/galleries/mixed", {"i4": pictures[4]})
    return root / "data"


@pytest.fixture
def settings(prepared: Path, tmp_path: Path) -> Settings:
    """A copy to damage."""
    shutil.copytree(prepared, tmp_path / "data")
    return Settings(data=tmp_path / "data", lease_seconds=0.05)


def deploy(served: Any, gallery: str, version: str, status: int = 201) -> dict[str, Any]:
    answered = served.http.post(f"/galleries/{gallery}/deployments", json={"version": version})
    assert answered.status_code == status, answered.text
    return dict(answered.json())


def change(settings: Settings, version: str, file: str = "encoder.onnx") -> None:
    with (settings.versions / version / file).open("ab") as stream:
        stream.write(b"x")


def remove(settings: Settings, version: str) -> None:
    shutil.rmtree(settings.versions / version)


def best(served: Any, gallery: str, picture: bytes) -> tuple[str, str]:
    answered = served.query(f"/galleries/{gallery}", picture, k=1)
    assert answered.status_code == 200, answered.text
    (match,) = answered.json()["results"][0]["matches"]
    return match["id"], match["version"]


DAMAGES = [
    pytest.param(change, "encoder.onnx", id="encoder"),
    pytest.param(lambda s, v: change(s, v, "card.json"), "card.json", id="card"),
    pytest.param(lambda s, v: (s.versions / v / "stray").write_text("x"), "stray", id="stray"),
    pytest.param(remove, "card.json", id="gone"),
]


@pytest.mark.parametrize(("damage", "named"), DAMAGES)
def test_a_version_nobody_uses_is_named_and_no_gallery_suffers(
    settings: Settings, pictures: list[bytes], damage: Any, named: str
) -> None:
    damage(settings, "v3")

    with serving(settings) as served:
        assert best(served, "whole", pictures[2]) == ("i2", "v1")
        assert best(served, "mixed", pictures[4]) == ("i4", "v2")
        listed = {v["name"]: v["problem"] for v in served.http.get("/versions").json()["versions"]}
        assert (listed["v1"], listed["v2"], named in listed["v3"]) == (None, None, True)
        ready = served.http.get("/health/ready")
        assert (ready.status_code, ready.json()["status"]) == (200, "degraded")
        assert any("version v3" in p and named in p for p in ready.json()["problems"])
        for refused in (
            served.http.post("/galleries/mixed/deployments", json={"version": "v3"}),
            served.http.post("/galleries/mixed/gates", json={"version": "v3"}),
            served.http.get("/work/versions/v3"),
        ):
            assert "v3" in problem(refused, 503, "version_broken")["detail"]
        # What was there before is answered as before, writes included.
        assert served.ingest("/galleries/whole", {"new": pictures[7]}).json()["stored"] == 1
        assert deploy(served, "whole", "v2")["state"] == "current"


@pytest.mark.parametrize(("damage", "named"), DAMAGES)
def test_a_current_version_answers_no_images_and_everything_else(
    settings: Settings, pictures: list[bytes], damage: Any, named: str
) -> None:
    damage(settings, "v2")

    with serving(settings) as served:
        for refused in (
            served.query("/galleries/mixed", pictures[0], k=1),
            served.ingest("/galleries/mixed", {"new": pictures[7]}),
            served.http.post("/galleries/mixed/backfills", json={}),
            served.http.post("/galleries/mixed/backfills", json={}, params={"dry_run": True}),
        ):
            assert named in problem(refused, 503, "version_broken")["detail"]
        shown = served.http.get("/galleries/mixed").json()
        assert (shown["current"], shown["mix"]) == ("v2", {"v1": 4, "v2": 1})
        assert served.http.get("/galleries/mixed/items/i4").json()["active"] == "v2"
        assert served.http.get("/galleries/mixed/items/i4/image").content == pictures[4]
        # Vectors in SQL are as good as ever.
        alike = served.http.post("/galleries/mixed/query", json={"items": ["i0"], "k": 1})
        assert alike.status_code == 200
        assert best(served, "whole", pictures[2]) == ("i2", "v1")

        # What only v2 has embedded needs its encoder from now on.
        problem(served.http.post("/galleries/mixed/rollback"), 409, "reach_lost", "/force")
        assert served.http.post("/galleries/mixed/rollback", json={"force": True}).json()["out_of_reach"] == {"v2": 1}
        assert best(served, "mixed", pictures[2]) == ("i2", "v1")
        assert any("gallery mixed: 1 items of v2" in p for p in served.http.get("/health/ready").json()["problems"])
        problem(served.http.post("/galleries/mixed/deployments", json={"version": "v2"}), 503, "version_broken")


@pytest.mark.parametrize(("damage", "named"), DAMAGES)
def test_registering_it_again_makes_it_whole_without_a_restart(
    settings: Settings, pictures: list[bytes], tmp_path: Path, damage: Any, named: str
) -> None:
    shutil.copytree(settings.versions / "v3", tmp_path / "v3")
    damage(settings, "v3")
    with serving(settings) as served:
        assert served.http.get("/health/ready").json()["status"] == "degraded"

        sent = served.http.post("/versions", files={"archive": ("v.zip", zip_version(tmp_path / "v3"))})

        assert (sent.status_code, sent.json()["problem"]) == (200, None), named
        assert served.http.get("/health/ready").json()["status"] == "ready"
        assert deploy(served, "mixed", "v3")["state"] == "current"
        answered = served.query("/galleries/mixed", pictures[4], k=5).json()
        assert {m["id"] for m in answered["results"][0]["matches"]} == {f"i{n}" for n in range(5)}
        assert answered["degraded"] == []
        assert {path.name for path in settings.versions.iterdir()} == {"v1", "v2", "v3"}


def test_nothing_rolls_back_to_a_version_that_is_set_aside(settings: Settings, pictures: list[bytes]) -> None:
    change(settings, "v1")

    with serving(settings) as served:
        problem(served.http.post("/galleries/mixed/rollback"), 503, "version_broken")
        assert served.http.get("/galleries/mixed").json()["current"] == "v2"
        # The edge to it is the newer version's, and whole: its items are found as before.
        assert best(served, "mixed", pictures[2]) == ("i2", "v1")


def test_an_edge_of_a_version_that_is_set_aside_is_used_as_far_as_its_files_are_whole(settings: Settings) -> None:
    change(settings, "v3", "edges/v2/edge.json")
    change(settings, "v2")

    with serving(settings) as served:
        told = {(e["new"], e["old"]): e["problem"] for e in served.http.get("/edges").json()["edges"]}

    assert told[("v2", "v1")] is None
    assert "edge.json" in told[("v3", "v2")]


def forward_zip(version: Version) -> bytes:
    """The folder of a version's forward edge as an archive."""
    (folder,) = (version.folder / "edges").iterdir()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as out:
        for path in folder.iterdir():
            out.write(path, path.name)
    return packed.getvalue()


class TestEdgeFolder:
    @pytest.fixture
    def added(self, settings: Settings, tmp_path: Path) -> Settings:
        """v4 with an edge to v2 that was added, and current in `mixed`."""
        v2 = make_version(tmp_path / "v2", "v2", 6)
        v4 = make_version(tmp_path / "v4", "v4", 6, seed=4)
        drawn = make_version(tmp_path / "drawn" / "v4", "v4", 6, seed=4, edges=[(v2, "forward")])
        with serving(settings) as served:
            assert served.register(v4).status_code == 201
            sent = served.http.post(
                "/edges", data={"new": "v4", "old": "v2"}, files={"archive": ("edge.zip", forward_zip(drawn))}
            )
            assert sent.status_code == 201, sent.text
        return settings

    @pytest.mark.parametrize("gone", [True, False], ids=["gone", "changed"])
    def test_it_is_named_and_no_item_is_moved_along_it(self, added: Settings, gone: bool) -> None:
        if gone:
            shutil.rmtree(added.edges)
        else:
            for path in added.edges.rglob("*.onnx"):
                path.write_bytes(b"changed")

        with serving(added) as served:
            (broken,) = (e for e in served.http.get("/edges").json()["edges"] if e["problem"])
            assert (broken["new"], broken["old"], broken["kind"]) == ("v4", "v2", "forward")
            ready = served.http.get("/health/ready").json()
            assert ready["status"] == "degraded"
            assert any("forward edge from v4 to v2" in p for p in ready["problems"])
            deploy(served, "mixed", "v4")
            refused = served.http.post("/galleries/mixed/backfills", json={"kind": "transform"})
            assert "v4 -> v2" in problem(refused, 503, "edge_broken")["detail"]
        database = Database(added.database_url)
        registry = Registry(database, added)
        embedder = Embedder(registry, open_blobs(database, added.blobs_url), Decoder(added.max_image_pixels))
        with pytest.raises(EdgeBroken, match="v4 -> v2"):
            embedder.forward(registry.named("v2"), registry.named("v4"))
        database.close()


def test_an_edge_that_is_damaged_while_the_service_runs_holds_up_no_new_gallery(
    settings: Settings, pictures: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    with serving(settings) as served:
        served.http.get("/galleries/mixed")
        for file in (settings.versions / "v3" / "edges" / "v2").iterdir():
            file.unlink()
        path = served.gallery("v1")
        served.ingest(path, {"i0": pictures[0]})

        assert best(served, path.rpartition("/")[2], pictures[0]) == ("i0", "v1")

        assert "action=edge_not_opened" in caplog.text
        named = " ".join(served.http.get("/health/ready").json()["problems"])
        assert "version v3 is quarantined" in named
        assert "the matrix edge from v3 to v2 is not used" in named
        # A gallery that has opened the edge before goes on along it.
        body = {"version": "v3", "embeddings": [[1.0] * 6], "k": 5}
        asked = served.http.post("/galleries/mixed/query", json=body).json()
        assert (len(asked["results"][0]["matches"]), asked["degraded"]) == (5, [])


@pytest.mark.parametrize(("damage", "named"), DAMAGES)
def test_a_folder_that_changes_while_the_service_runs_is_sent_to_no_remote_worker(
    settings: Settings, damage: Any, named: str
) -> None:
    with serving(settings) as served:
        damage(settings, "v3")

        assert named in problem(served.http.get("/work/versions/v3"), 503, "version_broken")["detail"]
        assert named in served.http.get("/versions/v3").json()["problem"]


def test_a_catalog_that_is_read_anew_knows_the_card_from_sql(settings: Settings) -> None:
    with running(settings) as runtime:
        whole = runtime.registry.named("v2").card
    remove(settings, "v2")

    with running(settings) as runtime:
        quarantined = runtime.registry.named("v2")

        assert quarantined.card == whole
        for read in (quarantined.images, quarantined.encoder, quarantined.texts):
            with pytest.raises(RegraftError, match=r"card\.json is missing"):
                read()
        assert "v2" not in runtime.registry.encoders()
