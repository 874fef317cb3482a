"""An import that was killed, again and again, goes on where it was, or says why it cannot."""

from __future__ import annotations

import json
import random
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from index.errors import InvalidArgument
from regraft import Client, cli
from regraft.sources.base import Wanted
from regraft.sources.table import TableFile
from regraft.transfer import import_state, imports
from regraft.transfer.exports import export_gallery
from regraft.transfer.import_state import ImportProgress
from regraft.transfer.imports import import_gallery
from staging.processes.forked import Forked, environment
from staging.states.transferred import COUNT, NEW, OLD, gallery, held
from staging.waiting import until


class Killed(BaseException):
    """What ends a process."""


@pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)
def test_an_import_that_is_killed_anywhere_and_run_again_stores_all_and_nothing_twice(
    client: Client, full: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_gallery(client, full, file := tmp_path / "full.parquet")
    other, draw, send = gallery(client, "other", "v2"), random.Random(0), client._send

    async def deadly(*args: Any, **request: Any) -> Any:
        moment = draw.random()
        if moment < 0.3:
            raise Killed
        answer = await send(*args, **request)
        if moment > 0.7:
            raise Killed
        return answer

    monkeypatch.setattr(client, "_send", deadly)
    deaths = 0
    while True:
        try:
            done = import_gallery(client, other, TableFile(file, Wanted()), tmp_path / "state", size=2)
            break
        except Killed:
            deaths += 1
    monkeypatch.undo()

    assert deaths > 5
    assert (done.read, done.stored, sum(done.skipped.values())) == (COUNT + 1, COUNT + 1, 0)
    assert held(client, other) == held(client, full)


@pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)
def test_an_import_whose_position_cannot_be_kept_stores_nothing(client: Client, tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": ["a"], "embedding": OLD[:1].tolist()}), file := tmp_path / "rows.parquet")
    name, state = gallery(client, "unkept", "v1"), tmp_path / "missing" / "state"

    with pytest.raises(InvalidArgument, match=r"cannot be kept in .*state \(No such file .*\): --state FILE"):
        import_gallery(client, name, TableFile(file, Wanted(version="v1")), state)

    assert client.gallery(name).items == 0


@pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)
@pytest.mark.parametrize("at", [1, 2, 3])
def test_of_an_id_that_comes_again_the_first_row_stays_wherever_the_import_was_killed(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    rows = {"id": ["same", "other", "same", "same"], "n": [0, 1, 2, 3], "v": OLD[:4].tolist()}
    second = {"w": [None, None, NEW[2].tolist(), NEW[3].tolist()]}
    pq.write_table(pa.table(rows | second), file := tmp_path / "rows.parquet")
    name, write = gallery(client, "again", "v1"), import_state.save
    source = TableFile(file, Wanted(vectors={"v": "v1", "w": "v2"}))

    def deadly(state: Path, progress: ImportProgress) -> None:
        if progress.read > at:
            raise Killed
        write(state, progress)

    monkeypatch.setattr(imports, "save", deadly)
    with pytest.raises(Killed):
        import_gallery(client, name, source, tmp_path / "state", size=1)
    monkeypatch.setattr(imports, "save", write)
    ids = (tmp_path / "state.ids").rename(tmp_path / "elsewhere")
    with pytest.raises(InvalidArgument, match="delete both"):
        import_gallery(client, name, source, tmp_path / "state", size=1)
    ids.rename(tmp_path / "state.ids")
    done = import_gallery(client, name, source, tmp_path / "state", size=1)

    assert (done.stored, done.skipped) == (2, {"duplicate_id, of v1 alone": 1, "duplicate_id": 1})
    metadata, _, embeddings = held(client, name)["same"]
    assert (metadata, [made[0] for made in embeddings]) == ({"n": 0}, ["v1", "v2"])
    assert embeddings[0][2] == pytest.approx(OLD[0] / np.linalg.norm(OLD[0]), abs=1e-5)
    assert list(tmp_path.glob("state*")) == []


@pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)
def test_an_import_that_starts_while_another_of_its_source_runs_is_refused_and_disturbs_nothing(
    client: Client, full: str, tmp_path: Path
) -> None:
    export_gallery(client, full, file := tmp_path / "full.parquet")
    other, state, refused = gallery(client, "other", "v2"), tmp_path / "state", []

    def start_another(_: ImportProgress) -> None:
        with pytest.raises(InvalidArgument, match=r"another import .* is running") as error:
            import_gallery(client, other, TableFile(file, Wanted()), state, size=2)
        refused.append(error)

    done = import_gallery(client, other, TableFile(file, Wanted()), state, size=7, on_batch=start_another)

    assert len(refused) > 1
    assert (done.stored, done.skipped) == (COUNT + 1, {})
    assert held(client, other) == held(client, full)
    assert list(tmp_path.glob("state*")) == []


def again(client: Client, name: str) -> None:
    """The gallery is deleted, and another one has its name."""
    client.delete_gallery(name)
    gallery(client, name, "v1")


def elsewhere(client: Client, _: str) -> None:
    """What is asked has another address."""
    client.url = client.url.replace("127.0.0.1", "localhost")


def nothing(*_: object) -> None:
    """All is as it was."""


@pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("meanwhile", "wanted", "update_only", "told"),
    [
        (again, Wanted(version="v1"), False, "created was"),
        (elsewhere, Wanted(version="v1"), False, "service was"),
        (nothing, Wanted(version="v2"), False, "version='v1'.*version='v2'"),
        (nothing, Wanted(version="v1", metadata=[]), False, "metadata=None"),
        (nothing, Wanted(version="v1"), True, "update_only was False, is True"),
    ],
)
def test_an_import_of_something_else_or_into_another_gallery_is_not_gone_on_with(
    client: Client, tmp_path: Path, meanwhile: Any, wanted: Wanted, update_only: bool, told: str
) -> None:
    pq.write_table(
        pa.table({"id": [str(n) for n in range(COUNT)], "vector": OLD.tolist()}), file := tmp_path / "x.parquet"
    )
    name, state = gallery(client, "photos", "v1"), tmp_path / "state"

    def kill(_: object) -> None:
        raise Killed

    with pytest.raises(Killed):
        import_gallery(client, name, TableFile(file, Wanted(version="v1")), state, size=7, on_batch=kill)
    meanwhile(client, name)
    with pytest.raises(InvalidArgument, match=told):
        import_gallery(client, name, TableFile(file, wanted), state, size=7, update_only=update_only)
    state.write_text(json.dumps({"source": TableFile(file, wanted).identity, "gallery": name, "cursor": 7}))
    with pytest.raises(InvalidArgument, match="an earlier release"):
        import_gallery(client, name, TableFile(file, wanted), state, size=7, update_only=update_only)


@pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)
def test_a_command_that_goes_on_after_a_deployment_says_so_instead_of_mixing_versions(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    pq.write_table(
        pa.table({"id": [str(n) for n in range(COUNT)], "vector": OLD.tolist()}), file := tmp_path / "x.parquet"
    )
    name, send = gallery(client, "photos", "v1"), import_state.save
    command = ["regraft", "import", name, str(file), "--batch", "7", "--url", client.url]

    def run(*more: str) -> int:
        monkeypatch.setattr(sys, "argv", [*command, *more])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0)

    def write(*args: Any) -> None:
        send(*args)
        raise Killed

    monkeypatch.setattr(imports, "save", write)
    with pytest.raises(Killed):
        run()
    monkeypatch.setattr(imports, "save", send)
    client.deploy(name, "v2")

    assert run() == 1
    assert "version='v1'" in capsys.readouterr().err
    assert run("--version", "v1") == 0
    assert (client.gallery(name).items, client.gallery(name).mix) == (COUNT, {"v1": COUNT})


def test_a_process_that_imports_is_killed_at_random_points_and_goes_on(
    client: Client, full: str, tmp_path: Path
) -> None:
    export_gallery(client, full, file := tmp_path / "full.parquet")
    other, state = gallery(client, "other", "v2"), tmp_path / "state"
    command = ["-m", "regraft", "import", other, file, "--batch", "1", "--state", state, "--url", client.url, "--json"]
    draw, deaths, reached = random.Random(1), 0, [0]

    def read() -> int:
        with suppress(FileNotFoundError):  # it goes once all is done
            return int(json.loads(state.read_text())["read"])
        return 0

    while reached[-1] < COUNT:
        process = Forked(command, environment(), tmp_path / f"out{deaths}")
        point = reached[-1] + draw.randint(2, 6)
        until(lambda: read() >= point or process.poll() is not None)  # noqa: B023 - it is asked in this turn only
        time.sleep(draw.random() / 50)
        process.kill()
        if process.wait(60) == 0:
            break
        deaths += 1
        if reached[-1] and not state.exists():  # killed when all was done
            break
        reached.append(read())
    if process.returncode != 0:
        assert Forked(command, environment(), tmp_path / f"out{deaths}").wait(60) == 0

    told = json.loads((tmp_path / f"out{deaths}").read_text().splitlines()[-1])
    assert deaths >= 2
    assert reached == sorted(reached)
    assert (told["read"], told["stored"], told["skipped"]) == (COUNT + 1, COUNT + 1, {})
    assert held(client, other) == held(client, full)
    assert not state.exists()
