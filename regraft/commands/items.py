"""`regraft item ...`: list, show, update and delete items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from index.errors import InvalidArgument
from regraft.client import Client
from regraft.commands.missing_fields import print_missing_fields
from regraft.ingest_batch import change_metadata
from regraft.models import DeleteResult, ItemPage, MetadataResult
from regraft.terminal.answers import answer, err, out
from regraft.terminal.command import Commands
from regraft.terminal.deletion import confirm_deleting
from regraft.terminal.options import DryRun, Gallery, Yes, read_filter, read_object
from regraft.terminal.printing import print_table, would

LARGEST_PAGE, CHANGED_AT_ONCE = 1000, 1000

item = Commands(no_args_is_help=True, help="List, show, change and delete the items of a gallery.")
ItemId = Annotated[str, typer.Argument(metavar="ITEM", help="The item's id.")]
Keys = Annotated[list[str] | None, typer.Argument(metavar="ITEM", help="Ids of items.", show_default=False)]
IdsFile = Annotated[
    Path | None,
    typer.Option("--ids", help="File of ids, one per line.", exists=True, dir_okay=False, show_default=False),
]
Filter = Annotated[
    str | None,
    typer.Option("--filter", metavar="JSON", help="Only items whose metadata match it.", show_default=False),
]


@item.command("list")
def list_items(
    client: Client,
    name: Gallery,
    limit: Annotated[int, typer.Option("--limit", min=1, max=LARGEST_PAGE, help="Items per page.")] = 100,
    cursor: Annotated[
        str | None,
        typer.Option("--cursor", help="Next page: the cursor that the last page printed.", show_default=False),
    ] = None,
    with_text: Annotated[bool, typer.Option("--with-text", help="Also show the texts of items.")] = False,
    where: Filter = None,
) -> None:
    """List items one page at a time, with metadata and the version that serves each.

    Example: regraft item list photos --filter '{"field": "label", "eq": "cats"}'
    """
    given = None if where is None else read_filter(where)
    page = ItemPage(items=[], next=cursor)
    while len(page.items) < limit:
        more = client.items(name, limit=limit - len(page.items), cursor=page.next, with_text=with_text, filter=given)
        page = ItemPage(items=[*page.items, *more.items], next=more.next)
        if page.next is None or given is None:
            break
    answer(page)
    titles, rows = ["item", "version", "metadata"], [[one.id, one.active, one.metadata] for one in page.items]
    if with_text:
        titles, rows = [*titles, "text"], [[*row, one.text] for row, one in zip(rows, page.items, strict=True)]
    print_table(titles, rows)
    if given is not None and not page.items:
        print_missing_fields(client, name, given)
    if page.next is not None:
        err.print(f"more items: --cursor {page.next}")


@item.command("show")
def show(
    client: Client,
    name: Gallery,
    key: ItemId,
    image: Annotated[
        Path | None,
        typer.Option("--image", metavar="FILE", help="Write the item's image to this file.", show_default=False),
    ] = None,
) -> None:
    """Show an item: metadata, text and embeddings."""
    found = client.item(name, key)
    if image is not None:
        image.write_bytes(client.item_image(name, key))
    answer(found)
    out.print(f"{found.id}: served by {found.active}, {'an image' if found.image else 'no image'}")
    out.print(f"metadata {found.metadata}")
    if found.text is not None:
        out.print(f"text {found.text}")
    print_table(["embedding", "origin"], [[held.version, held.origin] for held in found.embeddings])


@item.command("update")
def update(
    client: Client,
    name: Gallery,
    metadata: Annotated[
        str, typer.Option("--metadata", metavar="JSON", help="Changes: a JSON object; null removes a field.")
    ],
    keys: Keys = None,
    ids: IdsFile = None,
    where: Filter = None,
    dry_run: DryRun = False,
) -> None:
    """Change the metadata of items by JSON Merge Patch; other fields and embeddings stay.

    Example: regraft item update photos cats/1.png --metadata '{"price": 3, "sold": null}'

    Example: regraft item update photos --filter '{"field": "label", "eq": "cats"}' --metadata '{"checked": true}'
    """
    change = read_object(metadata, "metadata", {"price": 3, "sold": None})
    asked = _ids(keys, ids, where)
    if where is None:
        done = _update_named(client, name, asked, change, dry_run)
    else:
        done = client.update_metadata(name, filter=read_filter(where), metadata=change, dry_run=dry_run)
    answer(done)
    for error in done.errors:
        err.print(f"not changed: {error.id}: {error.detail}")
    out.print(f"{would(dry_run, 'changed', 'change')} the metadata of {_count(done.updated)} of {name}")
    if done.failed:
        raise typer.Exit(1)


def _update_named(
    client: Client, name: str, ids: Sequence[str], change: Mapping[str, Any], dry_run: bool
) -> MetadataResult:
    done = MetadataResult(updated=0, failed=0, errors=[])
    for start in range(0, len(ids), CHANGED_AT_ONCE):
        items = [{"id": key, "metadata": change} for key in ids[start : start + CHANGED_AT_ONCE]]
        some = change_metadata(partial(client.update_metadata, name, dry_run=dry_run), items)
        behind = [
            error.model_copy(update={"id": ids[start + error.index], "index": start + error.index})
            for error in some.errors
        ]
        done = MetadataResult(
            updated=done.updated + some.updated, failed=done.failed + some.failed, errors=[*done.errors, *behind]
        )
    return done


@item.command("delete")
def delete(
    client: Client,
    name: Gallery,
    keys: Keys = None,
    ids: IdsFile = None,
    where: Filter = None,
    yes: Yes = False,
    dry_run: DryRun = False,
) -> None:
    """Delete items with their images, texts and embeddings; unknown ids are listed.

    Example: regraft item delete photos cats/1.png cats/2.png

    Example: regraft item delete photos --ids gone.txt --yes

    Example: regraft item delete photos --filter '{"field": "label", "eq": "cats"}' --dry-run
    """
    asked = _ids(keys, ids, where)
    if where is None:
        count = _count(len(asked))
        confirm_deleting(f"{count} of gallery {name}", yes=yes or dry_run)
        done = _delete_named(client, name, asked, dry_run)
    else:
        given = read_filter(where)
        done = client.delete_items(name, filter=given, dry_run=dry_run or not yes)
        count = _count(done.deleted)
        if not (yes or dry_run):
            confirm_deleting(f"{count} of gallery {name}", yes=False)
            done = client.delete_items(name, filter=given)
    answer(done)
    for missing in done.missing:
        err.print(f"not found: {missing}")
    out.print(f"{would(dry_run, 'deleted', 'delete')} {done.deleted} of {count} from {name}")


def _ids(keys: Sequence[str] | None, ids: Path | None, where: str | None) -> list[str]:
    """The given ids without duplicates. Raises InvalidArgument if a filter is given too, or neither."""
    asked = list(dict.fromkeys([*(keys or []), *([] if ids is None else _read_ids(ids))]))
    if where is not None and (keys or ids):
        raise InvalidArgument("ids and --filter cannot be used together", pointer="/filter")
    if where is None and not asked:
        raise InvalidArgument("one of these is required: ids of items, --ids FILE or --filter", pointer="/ids")
    return asked


def _delete_named(client: Client, name: str, ids: Sequence[str], dry_run: bool) -> DeleteResult:
    done = DeleteResult(deleted=0, missing=[])
    for start in range(0, len(ids), CHANGED_AT_ONCE):
        some = client.delete_items(name, ids[start : start + CHANGED_AT_ONCE], dry_run=dry_run)
        done = DeleteResult(deleted=done.deleted + some.deleted, missing=[*done.missing, *some.missing])
    return done


def _count(items: int) -> str:
    return "1 item" if items == 1 else f"{items} items"


def _read_ids(path: Path) -> list[str]:
    """The non-empty lines of a file. Raises InvalidArgument if it is not a text."""
    try:
        with path.open(encoding="utf-8-sig") as lines:
            return [key for line in lines if (key := line.rstrip("\r\n"))]
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{path} cannot be read as ids, one per line: {error}", pointer="/ids") from error
