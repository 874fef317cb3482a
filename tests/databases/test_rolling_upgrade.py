"""A later release takes the place of this one while it serves: its migration only adds, so both run side by side."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from sqlalchemy import create_engine, inspect, text

import service.store.database.migration
from service.settings import Settings
from service.store.database.migration import MIGRATIONS, migrating, revisions, upgrade
from staging.inputs.builders import image_bytes, make_image, make_version, zip_version
from staging.processes.load import Load
from staging.processes.proxy import proxied
from staging.processes.site import Site

ADDED_SINCE = "0011"
"""Later migrations may only add to what is there then. It took away what 0.1.0 needs, which has to be stopped first."""
ITEMS, CLIENTS, K = 20, 3, 5

NEXT = """
import sqlalchemy as sa
from alembic import op
revision, down_revision = "9999", "{head}"

def upgrade():
    {body}
"""
ADDS = (
    "op.add_column('item', sa.Column('later', sa.Integer)); "
    "op.add_column('gallery', sa.Column('mark', sa.Integer, server_default='0', nullable=False)); "
    "op.create_table('later', sa.Column('id', sa.Integer, primary_key=True))"
)


@pytest.fixture(scope="module", autouse=True)
def _short_starts() -> None:
    """Here every migration runs."""


@pytest.fixture
def later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Makes this process the release after this one, with one more migration; others stay what they are."""
    copied, head = tmp_path / "migrations", revisions()[-1]
    shutil.copytree(MIGRATIONS, copied)

    def become(body: str) -> None:
        (copied / "versions" / "2099-01-01-9999_later.py").write_text(NEXT.format(body=body, head=head))
        monkeypatch.setattr(service.store.database.migration, "MIGRATIONS", copied)

    yield become
    monkeypatch.undo()


def columns(settings: Settings) -> dict[tuple[str, str], Any]:
    """Of every table."""
    engine = create_engine(settings.database_url)
    found = inspect(engine)
    named = [table for table in found.get_table_names() if table != "alembic_version"]
    made = {(table, column["name"]): column for table in named for column in found.get_columns(table)}
    engine.dispose()
    return made


def taken_away(before: dict[tuple[str, str], Any], after: dict[tuple[str, str], Any]) -> list[str]:
    """What a program written for one schema reads or writes and cannot in the other."""
    known = {table for table, _ in before}
    faults = [f"{table}.{column} is gone" for table, column in before if (table, column) not in after]
    for (table, name), column in after.items():
        old = before.get((table, name))
        if old is None and table in known and not column["nullable"] and column["default"] is None:
            faults.append(f"{table}.{name} must be given")
        if old is not None and str(old["type"]) != str(column["type"]):
            faults.append(f"{table}.{name} is another type")
        if old is not None and old["nullable"] and not column["nullable"]:
            faults.append(f"{table}.{name} must be given by now")
    return faults


def at(settings: Settings, revision: str) -> dict[tuple[str, str], Any]:
    settings.data.mkdir(parents=True, exist_ok=True)
    with migrating(settings.database_url) as config:
        command.upgrade(config, revision)
    return columns(settings)


def test_migrations_since_then_take_nothing_away(unmigrated: Settings) -> None:
    assert taken_away(at(unmigrated, ADDED_SINCE), at(unmigrated, "head")) == []


@pytest.mark.parametrize("dialect", ["postgresql"], indirect=True)
@pytest.mark.parametrize(
    ("body", "faults"),
    [
        (ADDS, []),
        ("op.drop_table('gallery_snapshot')", ["gallery_snapshot.created is gone"]),
        ("op.alter_column('item', 'blob', new_column_name='content')", ["item.blob is gone"]),
        ("op.add_column('item', sa.Column('x', sa.Integer, nullable=False))", ["item.x must be given"]),
        ("op.alter_column('item', 'blob', nullable=False)", ["item.blob must be given by now"]),
        ("op.alter_column('item', 'external_id', type_=sa.Text)", ["item.external_id is another type"]),
    ],
)
def test_what_takes_something_away_is_found(settings: Settings, later: Any, body: str, faults: list[str]) -> None:
    before = at(settings, "head")
    later(body)
    upgrade(settings)

    assert set(faults) <= set(taken_away(before, columns(settings)))
    assert bool(faults) == bool(taken_away(before, columns(settings)))


@pytest.mark.parametrize("dialect", ["postgresql"], indirect=True)
def test_this_release_serves_and_starts_on_the_schema_of_the_next(
    settings: Settings, later: Any, tmp_path: Path
) -> None:
    pictures = [image_bytes(make_image(n % 5, n)) for n in range(ITEMS)]
    with ExitStack() as stack:
        settings.data.mkdir(parents=True)
        sites = [stack.enter_context(closing(Site(settings.data, settings))) for _ in range(2)]
        proxy = stack.enter_context(proxied([site.port for site in sites]))
        running = [site.server() for site in sites]
        http = sites[0].http
        v1 = make_version(tmp_path / "v1", "v1", 4)
        assert http.post("/versions", files={"archive": zip_version(v1.folder)}).status_code == 201
        http.post("/galleries", json={"name": "g"})
        http.post("/galleries/g/deployments", json={"version": "v1"})

        def store(site: Site, number: int) -> None:
            data, files = {"items": f'[{{"id": "i{number}", "image": "a"}}]'}, [("images", ("a", pictures[number]))]
            assert site.http.post("/galleries/g/items", data=data, files=files).json()["stored"] == 1

        for number in range(ITEMS - 2):
            store(sites[number % 2], number)
        load = Load(f"{proxy.url}/v1/galleries/g/query", pictures, K, clients=CLIENTS)
        with load.running():
            load.wait(20)
            later(ADDS)
            upgrade(settings)  # what the first process of the next release does when it starts
            store(sites[0], ITEMS - 2)
            load.wait(20)
            for number, site in enumerate(sites):  # one that has to start again meanwhile
                running[number].send_signal(signal.SIGTERM)
                assert running[number].wait(30) == 0, site.log(running[number])
                running[number] = site.server()
                assert "schema_is_newer" in site.log(running[number])
            store(sites[1], ITEMS - 1)
            load.wait(20)

        assert (load.wrong, proxy.lost) == ([], [])
        assert http.get("/galleries/g").json()["items"] == ITEMS
    engine = create_engine(settings.database_url)
    with engine.connect() as connection:
        assert connection.execute(text("select version_num from alembic_version")).scalars().all() == ["9999"]
    engine.dispose()
