"""Galleries and what is in them: `regraft gallery ...`, `ingest` and `query`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import typer
from numpy.typing import NDArray

from index.engines.config import IndexKind, Storage
from index.errors import InvalidArgument
from regraft.client import DEFAULT_K, Client, ImageItem, InvalidInput, QueryOptions
from regraft.commands.answers import Commands, answer, err, out
from regraft.commands.item_files import below, by_id
from regraft.commands.options import (
    URL,
    ApiKey,
    DryRun,
    Gallery,
    Url,
    Yes,
    connect,
    delete_named,
    print_table,
    progress,
    read_filter,
    would,
)
from regraft.commands.texts import are_texts, find_texts, ingest_texts, nothing_stored, refused_as_result
from regraft.models import (
    EdgeUsed,
    GalleryInfo,
    ImageWarning,
    IngestResult,
    ItemError,
    Match,
    SearchedShard,
    SearchResponse,
)

IMAGE_SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})
MAX_BATCH_BYTES = 32 << 20

gallery = Commands(no_args_is_help=True, help="Create, list, show and delete galleries.")


@gallery.command("create")
def create(name: Gallery, url: Url = URL, api_key: ApiKey = None) -> None:
    """Create an empty gallery."""
    with connect(url, api_key) as client:
        created = client.create_gallery(name)
    answer(created)
    out.print(f"created gallery {name}")


@gallery.command("index")
def index(
    name: Gallery,
    kind: Annotated[IndexKind, typer.Argument(help="auto: inverted lists or a graph, what is faster at the recall.")],
    storage: Annotated[Storage, typer.Option(help="How an approximate index keeps vectors.")] = Storage.FLOAT32,
    recall: Annotated[float, typer.Option(help="Share of the exact ten best that it is to find.")] = 0.99,
    dry_run: DryRun = False,
    url: Url = URL,
    api_key: ApiKey = None,
) -> None:
    """Index a gallery otherwise from now on, while it serves."""
    options = {"kind": kind.value, "storage": storage.value, "recall": recall}
    with connect(url, api_key) as client:
        changed = client.change_gallery(name, index=options, dry_run=dry_run)
    answer(changed)
    done = would(dry_run, "indexes", "index")
    out.print(f"{done} gallery {name} by {kind.value}, {storage.value}, at recall {recall:g} from now on")


@gallery.command("list")
def list_galleries(url: Url = URL, api_key: ApiKey = None) -> None:
    """List the galleries."""
    with connect(url, api_key) as client:
        found = client.galleries()
    answer(found)
    print_table(["gallery", "current", "items", "mix"], [[g.name, g.current, g.items, _mix(g)] for g in found])


@gallery.command("show")
def show(name: Gallery, url: Url = URL, api_key: ApiKey = None) -> None:
    """Show a gallery: its version, its items, and which versions they are stored in."""
    with connect(url, api_key) as client:
        found = client.gallery(name)
    answer(found)
    out.print(f"{found.name}: current version {found.current}, {found.items} items ({_mix(found) or 'empty'})")
    if found.loading is not None:
        out.print(f"it is being loaded: {found.loading.done} of {found.loading.total} items; queries wait for it")
        return
    out.print(f"index {found.index.kind}: {found.indexed} items by it, the others are compared one by one")


@gallery.command("delete")
def delete(
    name: Gallery,
    yes: Yes = False,
    dry_run: DryRun = False,
    url: Url = URL,
    api_key: ApiKey = None,
) -> None:
    """Delete a gallery with everything in it."""
    delete_named("gallery", name, "all its items", yes=yes, dry_run=dry_run, url=url, api_key=api_key)


def ingest(
    name: Gallery,
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="FOLDER|FILES", help="Images, or folders of them; .txt and .jsonl files are texts."),
    ],
    texts: Annotated[bool, typer.Option("--texts", help="Of folders the .txt files, each a text, not images.")] = False,
    prefix: Annotated[str, typer.Option(help="Put before each id, to tell folders apart.", show_default=False)] = "",
    replace: Annotated[
        bool | None,
        typer.Option(
            "--replace/--no-replace",
            help="Items that are there: nothing of them stays, or they are refused.",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Images or texts a request.")] = 64,
    url: Url = URL,
    api_key: ApiKey = None,
) -> None:
    """Store images, or texts; metadata `label` is their folder.

    A line of a .jsonl file is {"id": "a", "text": "...", "metadata": {...}}. What is there is embedded by the current
    version.

    Example: regraft ingest photos my-images/

    Example: regraft ingest notes notes.jsonl
    """
    if texts or are_texts(paths):
        ingest_texts(name, find_texts(paths, prefix), replace, batch, url, api_key)
        return
    files = [(prefix + key, path) for key, path in find_images(paths).items()]
    counts: Counter[str] = Counter()
    lost: dict[tuple[str, str], ImageWarning] = {}
    errors: list[dict[str, object]] = []
    with connect(url, api_key) as client, progress() as bar:
        task = bar.add_task(f"ingest into {name}", total=len(files))
        for chunk in batches(files, batch):
            done = _store(client, name, chunk, replace)
            _add_up(lost, done.warnings)
            for error in done.errors:
                err.print(f"{chunk[error.index][1]}: {error.detail}")
                errors.append({"file": chunk[error.index][1], "code": error.code, "detail": error.detail})
            counts.update({kind: getattr(done, kind) for kind in ("stored", "new", "replaced", "failed")})
            bar.advance(task, len(chunk))
    answer({"gallery": name, **counts, "errors": errors, "warnings": list(lost.values())})
    counted = f"{counts['failed']} failed ({counts['new']} new, {counts['replaced']} replaced)"
    out.print(f"stored {counts['stored']} images in {name}, {counted}")
    _print_warnings(lost.values())
    if counts["failed"]:
        raise typer.Exit(1)


def query(
    name: Gallery,
    image: Annotated[
        Path | None, typer.Argument(metavar="[IMAGE]", help="The image to search with.", exists=True, dir_okay=False)
    ] = None,
    text: Annotated[str | None, typer.Option("--text", help="Search with a text instead.", show_default=False)] = None,
    like: Annotated[
        str | None, typer.Option("--like", metavar="ITEM", help="Search with a stored item.", show_default=False)
    ] = None,
    vector: Annotated[
        Path | None,
        typer.Option(
            "--vector", metavar="FILE", help="Search with vectors: an .npy of one, or of a row each.", exists=True
        ),
    ] = None,
    version: Annotated[
        str | None,
        typer.Option("--version", help="What made the vectors; default the current version.", show_default=False),
    ] = None,
    k: Annotated[int, typer.Option("-k", help="Matches wanted; fewer items give fewer.")] = DEFAULT_K,
    mode: Annotated[
        str | None,
        typer.Option(
            "--mode", help="calibrated, raw or rank; default what was measured, else a rule.", show_default=False
        ),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option("--threshold", help="Worst score of a match, on the scale of --mode.", show_default=False),
    ] = None,
    where: Annotated[
        str | None,
        typer.Option("--filter", metavar="JSON", help="Only items whose metadata pass it.", show_default=False),
    ] = None,
    fields: Annotated[
        str | None,
        typer.Option("--fields", metavar="LIST", help='Metadata to show: a,b.c; "": none.', show_default=False),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse an answer that leaves items out.")] = False,
    exact: Annotated[bool, typer.Option("--exact", help="Compare every item, whatever the index.")] = False,
    recall: Annotated[
        float | None,
        typer.Option("--recall", help="Another recall aim of the index than the gallery's.", show_default=False),
    ] = None,
    with_text: Annotated[bool, typer.Option("--with-text", help="Also show the texts that matches are.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Also show how each shard was reached.")] = False,
    url: Url = URL,
    api_key: ApiKey = None,
) -> None:
    """Search a gallery with an image, a text, an item or vectors.

    Example: regraft query photos cat.png -k 5 --filter '{"field": "label", "eq": "cats"}'

    Example: regraft query docs --vector query.npy --version api-v1
    """
    if sum(given is not None for given in (image, text, like, vector)) != 1:
        raise InvalidArgument("give one of IMAGE, --text, --like and --vector")
    if version is not None and vector is None:
        raise InvalidArgument("--version says what made the vectors of --vector", pointer="/version")
    given: dict[str, object] = {"mode": mode, "threshold": threshold, "recall": recall}
    given["filter"] = None if where is None else read_filter(where)
    given["fields"] = None if fields is None else [field for field in fields.split(",") if field]
    switched = {"exact": exact, "strict": strict, "with_text": with_text}
    asked = {name: value for name, value in given.items() if value is not None} | {"explain": explain}
    options = cast(QueryOptions, asked | {name: True for name, on in switched.items() if on})
    with connect(url, api_key) as client:
        if vector is not None:
            rows = _read_vectors(vector)
            found = client.query_embeddings(name, rows, version or _current(client, name), k, **options)
        else:
            images = [] if image is None else [image.read_bytes()]
            texts, items = ([] if one is None else [one] for one in (text, like))
            found = client.query(name, images, k, texts=texts, items=items, **options)
    answer(found)
    _print_answer(found, with_text)


def _print_answer(found: SearchResponse, with_text: bool) -> None:
    for number, result in enumerate(found.results):
        if len(found.results) > 1:
            out.print(f"row {number}")
        _print_matches(result.matches, with_text)
    if found.explain is not None:
        _print_shards(found.explain.shards, found.mode)
    for missing in found.degraded:
        err.print(f"not searched: {missing.items} items of {missing.version}: {missing.reason}")
    _print_warnings(found.warnings)


def _read_vectors(path: Path) -> NDArray[np.floating[Any]]:
    """The rows of an .npy, or its only vector as one.

    Raises:
        InvalidArgument: it is none, or holds something else.
    """
    try:
        loaded = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:  # numpy's words for a file that is empty, cut or of another kind
        raise InvalidArgument(f"{path} is no .npy file: {error}", pointer="/vector") from error
    if not isinstance(loaded, np.ndarray) or loaded.ndim not in (1, 2) or loaded.dtype.kind not in "fiu":
        raise InvalidArgument(f"{path} must hold one vector, or a matrix with a row each", pointer="/vector")
    return np.atleast_2d(loaded).astype(np.float32)


def _current(client: Client, name: str) -> str:
    current = client.gallery(name).current
    if current is None:
        raise InvalidArgument(
            f"{name} has no current version: --version says what made the vectors", pointer="/version"
        )
    return current


def _print_matches(matches: Sequence[Match], with_text: bool) -> None:
    rows = [[m.id, f"{m.score:.4f}", m.version, "+".join(m.route) or "same", m.metadata] for m in matches]
    titles = ["item", "score", "version", "route", "metadata"]
    if with_text:
        titles, rows = [*titles, "text"], [[*row, m.text or ""] for row, m in zip(rows, matches, strict=True)]
    print_table(titles, rows)


def find_images(paths: Sequence[Path]) -> dict[str, Path]:
    """The file of every image by its id: below a folder the path relative to it, else the path without its `..`.

    Raises:
        InvalidArgument: a path does not exist, there is no image at all, or two files would be one item.
    """
    found = by_id(
        ((file.relative_to(path) if path.is_dir() else _without_climbing(file)).as_posix(), file)
        for path in paths
        for file in below(path, IMAGE_SUFFIXES)
    )
    if not found:
        raise InvalidArgument(f"no image files found; looked for {', '.join(sorted(IMAGE_SUFFIXES))}")
    return found


def _without_climbing(file: Path) -> Path:
    """A path as it can be an id: none holds `..`."""
    return Path(*(part for part in Path(os.path.normpath(file)).parts if part != ".."))


def batches(files: Sequence[tuple[str, Path]], size: int) -> Iterator[list[tuple[str, Path]]]:
    """Cut files into batches of at most `size` files and about 32 MB."""
    chunk: list[tuple[str, Path]] = []
    total = 0
    for name, path in files:
        weight = _size(path)
        if chunk and (len(chunk) == size or total + weight > MAX_BATCH_BYTES):
            yield chunk
            chunk, total = [], 0
        chunk.append((name, path))
        total += weight
    if chunk:
        yield chunk


def _size(path: Path) -> int:
    """Bytes of a file; 0 where it cannot be read, which is told when its turn comes."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _store(client: Client, name: str, chunk: Sequence[tuple[str, Path]], replace: bool | None) -> IngestResult:
    """Send the files that can be sent; the others are errors of the result beside those that the service refuses."""
    items: dict[int, ImageItem] = {}
    unsent: dict[int, tuple[str, str]] = {}
    for index, (key, path) in enumerate(chunk):
        try:
            items[index] = _item(key, path)
        except InvalidInput as error:
            unsent[index] = error.code, error.message
        except OSError as error:
            unsent[index] = "os_error", error.strerror or str(error)
    errors = [ItemError(index=n, id=None, code=code, detail=why, pointer="") for n, (code, why) in unsent.items()]
    if not items:
        return nothing_stored(errors)
    done = refused_as_result(lambda: client.ingest(name, list(items.values()), replace=replace))
    sent = list(items)
    errors += [error.model_copy(update={"index": sent[error.index]}) for error in done.errors]
    return done.model_copy(update={"failed": len(errors), "errors": sorted(errors, key=lambda error: error.index)})


def _item(key: str, path: Path) -> ImageItem:
    """Raises InvalidInput or OSError where a file cannot be an item."""
    try:
        key.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput("its name is not UTF-8") from error
    if not (content := path.read_bytes()):
        raise InvalidInput("the file is empty")
    return ImageItem(key, content, {"label": path.resolve().parent.name})


def _add_up(lost: dict[tuple[str, str], ImageWarning], warnings: Sequence[ImageWarning]) -> None:
    """Count the warnings of a batch to those of the batches before, so that each is said once."""
    for warning in warnings:
        kind = (warning.code, warning.version)
        before = lost[kind].count if kind in lost else 0
        lost[kind] = warning.model_copy(update={"count": before + warning.count})


def _print_warnings(warnings: Iterable[ImageWarning]) -> None:
    for warning in warnings:
        images = "1 image" if warning.count == 1 else f"{warning.count} images"
        err.print(f"warning: {images}: {warning.detail}")


def _print_shards(shards: Sequence[SearchedShard], mode: str) -> None:
    rows = [
        [
            f"{shard.version} {shard.origin}",
            shard.items,
            "+".join(edge.kind for edge in shard.route) or "same",
            ", ".join(_measured(edge) for edge in shard.route),
            "yes" if shard.calibration else "no",
            f"{1000 * (shard.seconds.transform + shard.seconds.scan):.2f}",
        ]
        for shard in shards
    ]
    out.print(f"ranked together by mode {mode}")
    print_table(["shard", "items", "route", "measured", "calibrated", "ms"], rows)


def _measured(edge: EdgeUsed) -> str:
    scores = [f"{name} {score.value:.3f}" for name, score in edge.scores.items()]
    return f"{edge.new} > {edge.old}: {' '.join(scores) or 'nothing'}"


def _mix(found: GalleryInfo) -> str:
    return ", ".join(f"{version}: {count}" for version, count in found.mix.items())
