"""Edges that came after their version: a remote worker fetches the one that was named, and no other."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from index.errors import InvalidVersionFolder
from index.execution import Execution
from index.incoming import incoming_folder
from index.isolated import Limits
from index.version_folder.folder import card_sha256
from regraft.client import Client
from regraft.models import WorkEdge
from regraft.remote import RemoteWorker
from regraft.remote_folders import EDGES, FetchedFolders
from service.registry import edge_archive
from service.settings import Settings
from staging.api import edges
from staging.api.served import serving
from staging.api.work import KEY, WORKER_KEY
from staging.inputs.builders import make_version
from staging.processes.forked import Forked, environment
from staging.together import together
from staging.waiting import until

pytestmark = pytest.mark.usefixtures("keyed_alone")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """`sided`; `late`, whose folder has no edge; and archives of two different item edges between them."""
    root = tmp_path_factory.mktemp("drawn")
    sided = make_version(root / "sided", "sided", 3, side_dim=4)
    late = make_version(root / "late", "late", 5)
    fitted = make_version(root / "one" / "late", "late", 5, edges=[(sided, "forward")])
    other = make_version(root / "two" / "late", "late", 5, seed=3, edges=[(sided, "forward")])
    return {
        "versions": (sided, late),
        "first": edges.edge_archive(fitted, "sided"),
        "second": edges.edge_archive(other, "sided"),
    }


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory, drawn: dict[str, Any]) -> Iterator[Any]:
    settings = Settings(
        data=tmp_path_factory.mktemp("remote") / "data", api_key=KEY, worker_key=WORKER_KEY, lease_seconds=1
    )
    with serving(settings, authorization=f"Bearer {KEY}") as running:
        for version in drawn["versions"]:
            assert running.register(version).status_code == 201
        yield running


@pytest.fixture
def fill(keyed: Any, pictures: list[bytes]) -> Callable[..., tuple[str, int]]:
    def filled(**fields: Any) -> tuple[str, int]:
        path = keyed.filled(pictures, "sided", "late")
        return path, keyed.backfill(path, **{"kind": "transform", "chunk_size": 6, **fields})

    return filled


def send(keyed: Any, archive: bytes) -> dict[str, Any]:
    data = {"new": "late", "old": "sided", "replace": "true"}
    added = keyed.http.post("/edges", data=data, files={"archive": ("edge.zip", archive)})
    assert added.status_code == 201, added.text
    return dict(added.json())


def locally(keyed: Any, path: str) -> dict[str, Any]:
    keyed.work()
    return dict(keyed.stored(path, "late"))


@pytest.fixture
def process(keyed: Any, tmp_path: Path) -> Iterator[Callable[[], Forked]]:
    """Starts real remote workers, each with the folder of the one before."""
    started: list[Forked] = []
    url = keyed.url

    def start() -> Forked:
        command = ["-m", "regraft", "worker", "--url", url, "--data", tmp_path / "far"]
        started.append(Forked(command, environment(REGRAFT_WORKER_KEY=WORKER_KEY), tmp_path / "far.log"))
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.wait()


def wait_done(keyed: Any, number: int, worker: Forked) -> None:
    until(lambda: keyed.http.get(f"/backfills/{number}").json()["state"] == "done", worker)


def test_an_edge_added_later_reaches_a_remote_worker_and_so_does_the_one_that_replaces_it(
    keyed: Any, drawn: dict[str, Any], fill: Any, process: Any, tmp_path: Path
) -> None:
    assert send(keyed, drawn["first"])["origin"] == "added"
    path, number = fill()
    worker = process()
    wait_done(keyed, number, worker)
    by_the_first = keyed.stored(path, "late")

    send(keyed, drawn["second"])
    other, number = fill()
    wait_done(keyed, number, worker)
    by_the_second = keyed.stored(other, "late")
    worker.kill()
    worker.wait()

    # The files in the worker's folder are checked each time they are opened, and fetched again.
    (kept,) = (tmp_path / "far" / "worker" / EDGES / "late" / "sided").iterdir()
    (kept / "edge.onnx").write_bytes(b"changed")
    again, number = fill()
    worker = process()
    wait_done(keyed, number, worker)
    worker.kill()  # or it takes chunks of what is moved locally now
    worker.wait()

    assert len(by_the_first) == len(by_the_second) == 20
    assert by_the_first != by_the_second
    assert keyed.stored(again, "late") == by_the_second
    local, _ = fill()
    assert locally(keyed, local) == by_the_second
    send(keyed, drawn["first"])
    local, _ = fill()
    assert locally(keyed, local) == by_the_first


def claim(keyed: Any) -> dict[str, Any]:
    answer = keyed.http.post("/work:claim", json={"worker": "w"})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


class TestProtocol:
    @pytest.fixture
    def task(self, keyed: Any, drawn: dict[str, Any], fill: Any) -> dict[str, Any]:
        send(keyed, drawn["first"])
        fill(chunk_size=20)
        return claim(keyed)

    def test_a_claim_names_its_edges_which_the_worker_key_fetches(
        self, keyed: Any, task: dict[str, Any], tmp_path: Path
    ) -> None:
        (named,) = task["edges"]
        headers = {"authorization": f"Bearer {WORKER_KEY}"}
        fetched = keyed.http.get(f"/work/edges/{named['id']}", headers=headers)
        assert fetched.headers["content-type"] == "application/zip"
        (tmp_path / "e.zip").write_bytes(fetched.content)

        edge = edge_archive.unpack(tmp_path / "e.zip", tmp_path / "e", "late", "sided", named["sha256"])

        declared = keyed.runtime.registry.edge(("late", "sided", "forward"))
        assert (edge.as_json(), declared.id) == (declared.edge.as_json(), named["id"])
        assert (named["old"], len(named["old_card_sha256"])) == ("sided", 64)
        other = tmp_path / "other"
        with pytest.raises(InvalidVersionFolder, match="differs from the one"):
            edge_archive.unpack(tmp_path / "e.zip", other, "late", "sided", "0" * 64)

    def test_a_claim_needs_no_folder_of_the_versions_it_names(
        self, keyed: Any, drawn: dict[str, Any], fill: Any, tmp_path: Path
    ) -> None:
        send(keyed, drawn["first"])
        fill(chunk_size=20)
        for name in ("sided", "late"):
            (keyed.runtime.settings.versions / name).rename(tmp_path / name)
        try:
            task = claim(keyed)
        finally:
            for name in ("sided", "late"):
                (tmp_path / name).rename(keyed.runtime.settings.versions / name)

        sha256 = {name: card_sha256(keyed.runtime.settings.versions / name) for name in ("sided", "late")}
        assert (task["edges"][0]["old_card_sha256"], task["card_sha256"]) == (sha256["sided"], sha256["late"])

    @pytest.mark.parametrize("part", ["new", "old", "edge", "files"])
    def test_the_hash_is_over_everything_an_edge_consists_of(self, keyed: Any, task: Any, part: str) -> None:
        from dataclasses import replace

        edge = keyed.runtime.registry.edge(("late", "sided", "forward")).edge
        changed = {
            "new": replace(edge, new="other"),
            "old": replace(edge, old="other"),
            "edge": replace(edge, support=edge.support + 1),
            "files": replace(edge, hashes={**edge.hashes, "edge.onnx": "0" * 64}),
        }

        assert edge_archive.fingerprint(edge) == task["edges"][0]["sha256"]
        assert edge_archive.fingerprint(changed[part]) != edge_archive.fingerprint(edge)

    def test_what_a_replaced_edge_made_is_refused_as_a_whole_and_the_chunk_can_be_had_again(
        self, keyed: Any, drawn: dict[str, Any], task: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("service.upgrades.edges.changes._check_unused", behind_its_back)
        place, params = f"/work/{task['chunk']}", {"lease": task["lease"]}
        items = keyed.http.get(place, params=params).json()["items"]
        old = task["edges"][0]["id"]
        send(keyed, drawn["second"])
        good = "AACAPwAAAAAAAAAAAAAAAAAAAAA="
        moved = [{"item": i["item"], "seq": i["seq"], "vector": good} for i in items]

        refused = keyed.http.post(place, params=params, json={"moved": moved, "edges": [old]})

        assert (refused.status_code, refused.json()["code"]) == (409, "edge_replaced")
        assert keyed.http.get(f"/backfills/{task['backfill']}").json()["done"] == 0
        assert keyed.http.get(f"/work/edges/{old}").json()["code"] == "unknown_edge"
        assert keyed.http.post(f"{place}/release", params=params).status_code == 204
        again = claim(keyed)
        assert again["chunk"] == task["chunk"]
        assert again["edges"][0]["id"] > old
        accepted = keyed.http.post(
            place, params={"lease": again["lease"]}, json={"moved": moved, "edges": [again["edges"][0]["id"]]}
        )
        assert accepted.json()["done"] == 20

    def test_a_damaged_edge_is_neither_named_nor_sent(self, keyed: Any, task: dict[str, Any], tmp_path: Path) -> None:
        declared = keyed.runtime.registry.edge(("late", "sided", "forward"))
        (declared.edge.folder / "edge.onnx").write_bytes(b"changed")

        refused = keyed.http.get(f"/work/edges/{declared.id}")

        assert (refused.status_code, refused.json()["code"]) == (503, "edge_broken")
        assert "edge.onnx changed on disk" in keyed.runtime.registry.edge(("late", "sided", "forward")).problem
        with Client(keyed.url, WORKER_KEY) as client:
            folders = FetchedFolders(client, tmp_path / "kept", 1, Limits())
            with pytest.raises(Exception, match="changed on disk"):
                folders.edge("late", WorkEdge(**task["edges"][0]))
        assert not (tmp_path / "kept" / EDGES).exists()


def test_remains_of_a_killed_worker_are_swept_and_what_another_fetches_now_is_not(tmp_path: Path) -> None:
    for name in (".incoming-old", "late"):
        (tmp_path / name).mkdir()

    with Client("http://127.0.0.1:9", WORKER_KEY) as client, incoming_folder(tmp_path) as filled:
        FetchedFolders(client, tmp_path, 1, Limits())

        assert sorted(path.name for path in tmp_path.iterdir()) == [filled.name, "late"]


def test_workers_that_share_a_folder_fetch_once(
    keyed: Any, drawn: dict[str, Any], fill: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(keyed, drawn["first"])
    fill(chunk_size=20)
    task = claim(keyed)
    named = WorkEdge(**task["edges"][0])
    with Client(keyed.url, WORKER_KEY) as client:
        fetched: list[Any] = []
        # Nobody fetches before everyone looked whether it is there.
        looked = threading.Barrier(3)

        def slowly(fetch: Callable[..., bytes], *what: Any) -> bytes:
            fetched.append(what)
            with suppress(threading.BrokenBarrierError):
                looked.wait(0.2)
            return fetch(*what)

        for name in ("work_version", "work_edge"):
            monkeypatch.setattr(client, name, partial(slowly, getattr(client, name)))
        workers = [FetchedFolders(client, tmp_path, 1, Limits()) for _ in range(3)]

        together(3, lambda number: workers[number].version("late", task["card_sha256"]))
        together(3, lambda number: workers[number].edge("late", named))

    assert fetched == [("late",), (named.id,)]


def test_folders_that_are_deleted_while_a_worker_runs_are_fetched_again(
    keyed: Any, drawn: dict[str, Any], fill: Any, tmp_path: Path
) -> None:
    send(keyed, drawn["first"])
    fill(chunk_size=20)
    task = claim(keyed)
    with Client(keyed.url, WORKER_KEY) as client:
        folders = FetchedFolders(client, tmp_path, Execution(1), Limits())
        for _ in range(2):
            target = folders.version("late", task["card_sha256"])
            edge = folders.edge("late", WorkEdge(**task["edges"][0]))
            assert edge.edge.folder is not None
            assert (edge.edge.folder / "edge.onnx").is_file()
            assert (target.encoder(), target.id) == (folders.by_id(0).encoder(), 0)
            for kept in (*tmp_path.glob("late*"), tmp_path / EDGES):
                shutil.rmtree(kept)


def behind_its_back(backfills: Any) -> None:
    """The service replaces no edge that a backfill applies; a worker is to be safe from one that did."""


def test_a_worker_whose_edge_is_replaced_while_it_computes_starts_again_with_the_new_one(
    keyed: Any, drawn: dict[str, Any], fill: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.upgrades.edges.changes._check_unused", behind_its_back)
    send(keyed, drawn["second"])
    path, number = fill(chunk_size=20)
    stop = threading.Event()
    with Client(keyed.url, WORKER_KEY) as client:
        give = client.return_work
        answers: list[Any] = []

        def replaced_first(*args: Any) -> Any:
            if not answers:
                send(keyed, drawn["first"])
            answers.append(args)
            return give(*args)

        monkeypatch.setattr(client, "return_work", replaced_first)
        worker = threading.Thread(target=RemoteWorker(client, tmp_path / "far", stop).work, daemon=True)
        worker.start()
        try:
            until(lambda: keyed.http.get(f"/backfills/{number}").json()["state"] == "done")
        finally:
            stop.set()
            worker.join()

    assert len(answers) == 2
    by_the_first = keyed.stored(path, "late")
    local, _ = fill()
    assert by_the_first == locally(keyed, local)
