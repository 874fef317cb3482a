"""On PostgreSQL, embeddings in partitions by gallery and version; SQLite keeps its one table.

What no partition was made for lies in `embedding_default`, until the service brings it into one of its own. A program
of the release before says no gallery: a trigger there does it in its place.

Revision: 0020
Follows: 0019
"""

from __future__ import annotations

from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

LARGEST = """
select gallery_id, version_id from embedding_before join item on item.id = item_id
group by gallery_id, version_id order by count(*) desc, gallery_id, version_id limit 200
"""
"""Each takes five of the locks of this one transaction, and a server has 6,400 by default."""
COLUMNS = "item_id, version_id, origin, vector, side, uncertainty, digest"
TABLE = """
create table embedding (
    item_id bigint not null, version_id bigint not null, origin varchar(16) not null, vector bytea not null,
    side bytea, uncertainty float, digest bytea, {gallery_id}
    constraint ck_embedding_origin check (origin in ('encoded', 'transformed', 'supplied'))
) {partitioned}
"""
ARRIVES = """
create function embedding_arrives() returns trigger language plpgsql as $$
begin
    select gallery_id into new.gallery_id from item where id = new.item_id;
    if new.gallery_id is null then
        new.gallery_id := 0;
        return new;  -- which refers to no item, and is refused
    end if;
    insert into embedding select (new).*;
    return null;
end
$$
"""
TRIGGER = """
create trigger embedding_arrives before insert on embedding_default
for each row when (new.gallery_id = 0) execute function embedding_arrives()
"""


def upgrade() -> None:
    if not _limited():
        return
    op.execute("drop index ix_item_gallery_id_id")
    op.execute("create unique index ix_item_gallery_id_id on item (gallery_id, id)")  # embeddings refer to it
    _make(gallery_id="gallery_id bigint not null default 0,", partitioned="partition by range (gallery_id, version_id)")
    op.execute("create table embedding_default partition of embedding default")
    for gallery, version in op.get_bind().exec_driver_sql(LARGEST).all():
        place = f"for values from ({gallery}, {version}) to ({gallery}, {version + 1})"
        op.execute(f"create table embedding_{gallery}_{version} partition of embedding {place}")
    _fill(f"gallery_id, {COLUMNS}", "embedding_before join item on item.id = item_id")
    _constrain("item_id, version_id, gallery_id", "gallery_id, item_id", "gallery_id, id")
    op.execute(ARRIVES)
    op.execute(TRIGGER)


def downgrade() -> None:
    if not _limited():
        return
    _make(gallery_id="", partitioned="")
    _fill(COLUMNS, "embedding_before")
    _constrain("item_id, version_id", "item_id", "id")
    op.execute("drop function embedding_arrives()")
    op.execute("drop index ix_item_gallery_id_id")
    op.execute("create index ix_item_gallery_id_id on item (gallery_id, id)")


def _limited() -> bool:
    """Whether this is PostgreSQL, where whoever waits for a lock holds everyone up, and so gives up soon."""
    if op.get_bind().dialect.name != "postgresql":
        return False
    op.execute("set local lock_timeout = '5s'")
    return True


def _make(**parts: str) -> None:
    op.execute("alter table embedding rename to embedding_before")
    op.execute("alter table embedding_before drop constraint pk_embedding")
    op.execute("drop index ix_embedding_version_id")
    op.execute(TABLE.format(**parts))


def _fill(columns: str, before: str) -> None:
    named = ", ".join(f"embedding_before.{one}" if one == "version_id" else one for one in columns.split(", "))
    op.execute(f"insert into embedding ({columns}) select {named} from {before}")  # noqa: S608 - no value of a user
    op.execute("drop table embedding_before cascade")


def _constrain(key: str, item: str, items: str) -> None:
    """After the rows are there: all at once is faster."""
    op.execute(f"alter table embedding add constraint pk_embedding primary key ({key})")
    op.execute(
        f"alter table embedding add constraint fk_embedding_item_id foreign key ({item}) references item ({items})"
    )
    version = "foreign key (version_id) references version (id)"
    op.execute(f"alter table embedding add constraint fk_embedding_version_id {version}")
    op.execute("create index ix_embedding_version_id on embedding (version_id)")
