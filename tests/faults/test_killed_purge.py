"""kill -9 while the rows of deleted items are purged: whole blocks are gone, no item returns, the rest goes later."""

from __future__ import annotations

import pytest
from sqlalchemy import func, select, true, update

from service.registry.registry import Registry
from service.replica.replica import Replica
from service.store.galleries.items import delete_items
from service.store.tables import gallery, item
from service.upgrades.tombstones import SETTLE_SECONDS, TombstonePurger
from staging.processes.site import Site
from staging.waiting import until


def delete(site: Site, gallery_id: int, *names: str) -> None:
    with site.database.write() as connection:
        delete_items(connection, gallery_id, names)


def pass_a_day(site: Site) -> None:
    with site.database.write() as connection:
        connection.execute(update(gallery).values(settling_since=gallery.c.settling_since - SETTLE_SECONDS))


def tombstones(site: Site) -> int:
    with site.database.lookup() as connection:
        count = select(func.count()).select_from(item).where(item.c.deleted == true())
        return int(connection.execute(count).scalar_one())


@pytest.mark.parametrize("block", [1, 2])
def test_whole_blocks_are_gone_no_item_returns_and_the_rest_goes_a_day_later(site: Site, block: int) -> None:
    registry = Registry(site.database, site.settings)
    registry.sync()
    replica = Replica(site.database, registry, site.settings.indexes, site.settings.poll_seconds)
    loaded = replica.find("g")
    delete(site, loaded.id, *(f"i{n}" for n in range(25)))
    TombstonePurger(site.database).look()
    pass_a_day(site)
    delete(site, loaded.id, "i30")
    kept = site.state("g")
    assert len(kept) == 22

    doomed = site.launch("tests/faults/doomed_server.py", str(site.port), "purging", str(block))
    doomed.wait(timeout=30)

    assert tombstones(site) == 26 - 10 * (block - 1)
    replica.refresh(loaded.id)  # which has not followed since before the deletions
    assert len(loaded.gallery.keys()) == 22
    pass_a_day(site)
    restarted = site.launch("tests/faults/doomed_server.py", str(site.port), "purging", "0")
    until(lambda: tombstones(site) == 0, restarted)
    until(site.answers, restarted)
    assert site.http.get("/galleries/g").json()["items"] == 22
    assert site.state("g") == kept
    assert len(site.state("h")) == 48
