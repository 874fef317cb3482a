from __future__ import annotations

import io
import json
import threading
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select

import service.http.upgrades.versions
from index import isolated
from index.errors import InvalidVersionFolder
from index.version import Version
from index.version_folder.folder import write_card
from regraft.models import VersionInfo
from service.store.tables import edge, version
from staging.api.edges import edge_archive
from staging.api.served import problem, serving
from staging.inputs.builders import make_version, zip_version


def send(served: Any, archive: bytes) -> Any:
    return served.http.post("/versions", files={"archive": ("v.zip", archive)})


def traces(served: Any) -> tuple[set[str], int, int]:
    """What a registration may leave behind: folders, rows of versions, rows of edges."""
    folders = {p.name for p in (served.runtime.settings.versions).iterdir()}
    with served.runtime.database.lookup() as connection:
        rows = [connection.execute(select(func.count()).select_from(table)).scalar_one() for table in (version, edge)]
    return folders, rows[0], rows[1]


def test_a_version_is_registered_once_and_then_known(served: Any, versions: dict[str, Version]) -> None:
    shown = served.http.get("/versions/v2").json()

    assert shown.pop("created") > 1_700_000_000
    scores = {"cmc@1": {"value": 0.9, "low": 0.85, "high": pytest.approx(0.95)}}
    assert shown == {
        "name": "v2",
        "dim": 6,
        "space": {"kind": "cosine"},
        "method": "independent",
        "metrics": {},
        "side_dim": 0,
        "encoder": True,
        "text": False,
        "loaded": [],
        "edges": [{"old": "v1", "kind": "truncate", "scores": scores}],
        "problem": None,
    }
    listed = served.http.get("/versions").json()["versions"]
    assert [v["name"] for v in listed][:3] == ["v1", "v2", "plain"]
    assert traces(served)[0] >= set(versions)


def test_sending_it_again_changes_nothing(served: Any, versions: dict[str, Version]) -> None:
    before = traces(served)

    again = served.register(versions["v2"])

    assert again.status_code == 200
    assert again.json() == served.http.get("/versions/v2").json()
    assert before == traces(served)


def test_a_name_stands_for_one_content(served: Any, tmp_path: Path) -> None:
    before = traces(served)

    problem(served.register(make_version(tmp_path / "v1", "v1", 4, seed=3)), 409, "version_exists", "/archive")

    assert before == traces(served)
    assert served.query(served_items(served), picture(served), k=1).status_code == 200


def served_items(served: Any) -> str:
    path = served.gallery()
    assert served.ingest(path, {"a": picture(served)}).status_code == 200
    return str(path)


def picture(served: Any) -> bytes:
    from PIL import Image

    stream = io.BytesIO()
    Image.new("L", (8, 8), 77).save(stream, "PNG")
    return stream.getvalue()


def remove_file(folder: Path) -> None:
    (folder / "encoder.onnx").unlink()


def change_file(folder: Path) -> None:
    (folder / "encoder.onnx").write_bytes(b"other")


def break_card(folder: Path) -> None:
    (folder / "card.json").write_text("{")


def wrong_dim(folder: Path) -> None:
    card = json.loads((folder / "card.json").read_text())
    (folder / "card.json").write_text(json.dumps({**card, "dim": 5}))


def unknown_edge(folder: Path) -> None:
    (folder / "edges" / "v1").rename(folder / "edges" / "v0")
    rewrite(folder)


def unfit_edge(folder: Path) -> None:
    place = folder / "edges" / "v1" / "edge.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), "kind": "identity"}))
    rewrite(folder)


def rewrite(folder: Path) -> None:
    from index.version_folder.card import parse_card

    write_card(folder, parse_card(json.loads((folder / "card.json").read_text())))


@pytest.mark.parametrize(
    ("damage", "pointer"),
    [
        (remove_file, "/encoder.onnx"),
        (change_file, "/encoder.onnx"),
        (break_card, "/card.json"),
        (wrong_dim, "/encoder.onnx"),
        (unknown_edge, "/edges/v0"),
        (unfit_edge, "/edges/v1"),
    ],
)
def test_a_damaged_folder_is_refused_whole(
    served: Any, versions: dict[str, Version], tmp_path: Path, damage: Callable[[Path], None], pointer: str
) -> None:
    folder = make_version(tmp_path / "new", f"new-{damage.__name__}", 6, edges=[(versions["v1"], "truncate")]).folder
    damage(folder)
    before = traces(served)

    refused = send(served, zip_version(folder))

    problem(refused, 422, "invalid_version_folder", pointer)
    assert before == traces(served)


def deep(card: dict[str, Any]) -> None:
    value: Any = 1
    for _ in range(260):
        value = [value]
    card["metrics"] = {"a": value}


def half_a_pair(card: dict[str, Any]) -> None:
    card["method"] = "\ud800"


@pytest.mark.parametrize(("spoil", "pointer"), [(deep, "/metrics/a/0/0"), (half_a_pair, "/method")])
def test_a_card_that_could_not_be_listed_is_not_registered(
    served: Any, spoil: Callable[[dict[str, Any]], None], pointer: str
) -> None:
    before = traces(served)
    card: dict[str, Any] = {"format": 1, "name": "odd", "dim": 3, "space": {"kind": "l2"}}
    spoil(card)
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as packed:
        packed.writestr("card.json", json.dumps(card))

    found = problem(send(served, stream.getvalue()), 422, "invalid_version_folder")

    assert found["errors"][0]["pointer"].startswith(pointer)
    assert before == traces(served)
    assert served.http.get("/versions").status_code == 200


def test_what_cannot_be_answered_is_not_committed(served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_version(tmp_path / "v", "unspeakable", 3, encoder=False)
    before = traces(served)
    monkeypatch.setattr(VersionInfo, "model_dump_json", lambda self: 1 / 0)

    assert served.register(made).status_code == 500

    assert before == traces(served)


@pytest.mark.parametrize("part", ["version", "edge"])
def test_what_never_ends_holds_up_nobody_else(
    served: Any, versions: dict[str, Version], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Its models are run by another process, which has so much time; meanwhile others come and go."""
    place = {"version": "encoder.onnx", "edge": "edges/v1/edge.onnx"}[part]
    made = make_version(tmp_path / "v", "endless", 6, edges=[(versions["v1"], "onnx")])
    begun, go_on = threading.Event(), threading.Event()

    def verifying(asked: Any, limits: Any) -> None:
        begun.set()
        assert go_on.wait(10)
        raise InvalidVersionFolder(f"{place} is not verified in time", pointer=f"/{place}")

    monkeypatch.setattr(isolated, "_ask", verifying)
    with ThreadPoolExecutor() as threads:
        if part == "version":
            waiting = threads.submit(served.register, made)
        else:
            archive = {"archive": ("e.zip", edge_archive(made, "v1"))}
            form = {"new": "v2", "old": "v1"}
            waiting = threads.submit(served.http.post, "/edges", data=form, files=archive)
        assert begun.wait(10)
        other = make_version(tmp_path / "w", f"beside-{part}", 3, encoder=False)
        assert served.register(other).status_code == 201
        assert served.remove(f"/versions/{other.name}").status_code == 204
        go_on.set()
        problem(waiting.result(), 422, "invalid_version_folder", f"/{place}")


def archived(*names: str, link: bool = False) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as packed:
        for name in names:
            entry = zipfile.ZipInfo(name)
            if link:
                entry.external_attr = 0o120777 << 16
            packed.writestr(entry, "x")
    return stream.getvalue()


@pytest.mark.parametrize(
    "archive",
    [
        b"",
        b"no zip",
        archived(),
        archived("../../escaped"),
        archived("/escaped"),
        archived("card.json", link=True),
        archived("v1/card.json"),
        archived("card.json")[:-10],
    ],
    ids=["empty", "no zip", "no file", "escaping", "absolute", "link", "nested", "truncated"],
)
def test_what_is_no_version_archive_is_refused(served: Any, archive: bytes, tmp_path: Path) -> None:
    before = traces(served)

    problem(send(served, archive), 422, "invalid_version_folder")

    assert before == traces(served)
    assert not list(Path(served.runtime.settings.data).rglob("escaped"))


def test_the_archive_is_a_file_of_a_form(served: Any) -> None:
    for form in (
        {"data": {"archive": "text"}, "files": {"x": b""}},
        {"files": {"other": b"x"}},
        {"files": [("archive", b"x"), ("archive", b"x")]},
        {"data": {"a": "b"}, "files": {"archive": b"x"}},
    ):
        response = served.http.post("/versions", **form)
        assert response.status_code in (413, 422)
        problem(response, response.status_code, response.json()["code"])
    problem(served.http.post("/versions", json={}), 415, "unsupported_media_type")


def test_an_unknown_version_is_a_problem(served: Any) -> None:
    detail = problem(served.http.get("/versions/v9"), 404, "unknown_version")["detail"]

    assert "v9" in detail
    assert "v1" in detail


@pytest.mark.parametrize("step", ["insert_version", "sync_all"])
def test_a_crash_while_registering_leaves_no_version_and_can_be_repeated(
    served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    made = make_version(tmp_path / step, f"after-{step.replace('_', '-')}", 4)
    rows = traces(served)[1:]
    original = getattr(service.http.upgrades.versions, step)
    calls = []

    def crash(*arguments: Any) -> Any:
        calls.append(arguments)
        # The last use of sync_all is the one between the rename and the commit.
        if step == "insert_version" or arguments[0] == [served.runtime.settings.versions]:
            raise OSError("power cut")
        return original(*arguments)

    monkeypatch.setattr(service.http.upgrades.versions, step, crash)
    assert served.register(made).status_code == 500
    assert calls
    assert rows == traces(served)[1:]
    assert served.http.get(f"/versions/{made.name}").status_code == 404
    monkeypatch.undo()

    assert served.register(made).status_code == 201
    assert served.http.get(f"/versions/{made.name}").json()["dim"] == 4
    assert not [name for name in traces(served)[0] if name.startswith(".")]


def test_remains_of_a_killed_upload_are_swept_at_the_next_start(tmp_path: Path, versions: dict[str, Version]) -> None:
    from service.settings import Settings

    settings = Settings(data=tmp_path)
    with serving(settings) as first:
        assert first.register(versions["v1"]).status_code == 201
    (settings.versions / ".incoming-1").mkdir()
    (settings.versions / ".incoming-1" / "archive.zip").write_bytes(b"half")

    with serving(settings) as second:
        assert [v["name"] for v in second.http.get("/versions").json()["versions"]] == ["v1"]
        assert {p.name for p in settings.versions.iterdir()} == {"v1"}
