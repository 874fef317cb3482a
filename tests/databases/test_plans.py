"""What has to be quick at any size: read off the plan that the database makes for the very statement."""

from __future__ import annotations

from sqlalchemy import Connection, event, insert, select, text

from service.settings import Settings
from service.store.database.connections import Database
from service.store.database.migration import upgrade
from service.store.galleries.gallery import insert_gallery
from service.store.galleries.items import items_after
from service.store.sql.arrays import select_keys
from service.store.tables import item, version
from staging.states.plans import Planning

EXPLAIN = {"sqlite": "EXPLAIN QUERY PLAN ", "postgresql": "EXPLAIN "}


def plan_of_a_page(connection: Connection, gallery_id: int, after: int) -> str:
    asked: list[tuple[str, object]] = []

    def note(_: object, __: object, statement: str, parameters: object, *___: object) -> None:
        asked.append((statement, parameters))

    event.listen(connection, "before_cursor_execute", note)
    assert len(items_after(connection, gallery_id, after, 10)) == 10
    event.remove(connection, "before_cursor_execute", note)
    ((statement, parameters),) = asked
    plan = connection.exec_driver_sql(EXPLAIN[connection.dialect.name] + statement, parameters)
    return "\n".join(str(row) for row in plan)


def test_a_page_of_items_is_read_in_its_order_from_an_index_without_deleted_ones(settings: Settings) -> None:
    upgrade(settings)
    database = Database(settings.database_url)
    with database.write() as connection:
        connection.execute(
            insert(version).values(name="v1", card={"files": {"encoder.onnx": "0"}}, card_sha256="", created=0)
        )
        galleries = [insert_gallery(connection, name) for name in "gh"]
        stored = {"metadata": {}, "deleted": False, "created": 0}
        rows = [
            {"gallery_id": galleries[n % 2], "external_id": str(n), "seq": n, **stored, "deleted": n < 3500}
            for n in range(4000)
        ]
        connection.execute(insert(item), rows)
        connection.execute(text("ANALYZE"))
    with database.read() as connection:
        plan = plan_of_a_page(connection, galleries[1], 0)
    database.close()

    assert "ix_item_live" in plan
    assert "sort" not in plan.lower()
    assert "temp b-tree" not in plan.lower()


def test_planning_reads_one_value_and_not_a_row_for_each_item(settings: Settings) -> None:
    upgrade(settings)
    database = Database(settings.database_url)
    planning = Planning(database)
    gallery_id = planning.gallery(100)
    fetched: list[int] = []
    with database.write() as connection:
        event.listen(connection, "after_cursor_execute", lambda _, cursor, *__: fetched.append(cursor.rowcount))
        found = select_keys(connection, select(item.c.id).where(item.c.gallery_id == gallery_id))
        assert select_keys(connection, select(item.c.id).where(item.c.id < 0)).tolist() == []
    backfill_id = planning.start(gallery_id, item_order="random", chunk_size=30)

    planned = planning.planned(backfill_id)
    database.close()

    assert found.tolist() == sorted(found.tolist())
    assert len(fetched) == 2
    assert max(fetched) <= 1
    assert [len(chunk) for chunk in planned] == [30, 30, 30, 10]
    assert len({key for chunk in planned for key in chunk}) == 100
