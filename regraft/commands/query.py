"""`regraft query`: search a gallery, and print the matches and how they were found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import typer
from numpy.typing import NDArray

from index.errors import InvalidArgument
from index.numpy_file import HoldsObjects, load_array
from regraft.client import DEFAULT_K, Client, QueryOptions
from regraft.commands.missing_fields import print_missing_fields
from regraft.models import EdgeUsed, Match, SearchedShard, SearchResponse
from regraft.terminal.answers import answer, err, out
from regraft.terminal.options import Gallery, read_filter
from regraft.terminal.printing import print_table, print_warnings


def query(
    client: Client,
    name: Gallery,
    image: Annotated[
        Path | None, typer.Argument(metavar="[IMAGE]", help="Image to search with.", exists=True, dir_okay=False)
    ] = None,
    text: Annotated[str | None, typer.Option("--text", help="Search with a text instead.", show_default=False)] = None,
    like: Annotated[
        str | None, typer.Option("--like", metavar="ITEM", help="Search with a stored item.", show_default=False)
    ] = None,
    vector: Annotated[
        Path | None,
        typer.Option(
            "--vector", metavar="FILE", help="Search with vectors: an .npy of one, or of one per row.", exists=True
        ),
    ] = None,
    version: Annotated[
        str | None,
        typer.Option("--version", help="Version of the vectors; default: the current version.", show_default=False),
    ] = None,
    k: Annotated[int, typer.Option("-k", help="Maximum number of matches.")] = DEFAULT_K,
    mode: Annotated[
        str | None,
        typer.Option(
            "--mode",
            help="Score mode: calibrated, raw or rank; default: the best measured one, else by rule.",
            show_default=False,
        ),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(
            "--threshold", help="Worst score that a match may have, on the scale of --mode.", show_default=False
        ),
    ] = None,
    where: Annotated[
        str | None,
        typer.Option("--filter", metavar="JSON", help="Only items whose metadata match it.", show_default=False),
    ] = None,
    fields: Annotated[
        str | None,
        typer.Option("--fields", metavar="LIST", help='Metadata fields to show: a,b.c; "": none.', show_default=False),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail if items are left out of the search.")] = False,
    exact: Annotated[bool, typer.Option("--exact", help="Search exhaustively, without the index.")] = False,
    recall: Annotated[
        float | None,
        typer.Option("--recall", help="Recall to reach, instead of the gallery's.", show_default=False),
    ] = None,
    with_text: Annotated[bool, typer.Option("--with-text", help="Also show the texts of matches.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Also show the route to each shard.")] = False,
) -> None:
    """Search a gallery with an image, a text, an item or vectors.

    Example: regraft query photos cat.png -k 5 --filter '{"field": "label", "eq": "cats"}'

    Example: regraft query docs --vector query.npy --version api-v1
    """
    if sum(given is not None for given in (image, text, like, vector)) != 1:
        raise InvalidArgument("exactly one of IMAGE, --text, --like and --vector is required")
    if version is not None and vector is None:
        raise InvalidArgument("--version can only be used with --vector", pointer="/version")
    given: dict[str, object] = {"mode": mode, "threshold": threshold, "recall": recall}
    given["filter"] = passing = None if where is None else read_filter(where)
    given["fields"] = None if fields is None else [field for field in fields.split(",") if field]
    switched = {"exact": exact, "strict": strict, "with_text": with_text}
    asked = {name: value for name, value in given.items() if value is not None} | {"explain": explain}
    options = cast(QueryOptions, asked | {name: True for name, on in switched.items() if on})
    if vector is not None:
        rows = _read_vectors(vector)
        found = client.query_embeddings(name, rows, version or _current(client, name), k, **options)
    else:
        images = [] if image is None else [image.read_bytes()]
        texts, items = ([] if one is None else [one] for one in (text, like))
        found = client.query(name, images, k, texts=texts, items=items, **options)
    answer(found)
    _print_answer(found, with_text)
    if passing is not None and not any(result.matches for result in found.results):
        print_missing_fields(client, name, passing)


def _print_answer(found: SearchResponse, with_text: bool) -> None:
    for number, result in enumerate(found.results):
        if len(found.results) > 1:
            out.print(f"row {number}")
        _print_matches(result.matches, with_text)
    if found.explain is not None:
        _print_shards(found.explain.shards, found.mode)
    for missing in found.degraded:
        err.print(f"not searched: {missing.items} items of {missing.version}: {missing.reason}")
    print_warnings(found.warnings)


def _read_vectors(path: Path) -> NDArray[np.floating[Any]]:
    """The rows of an .npy; a single vector is one row.

    Raises:
        InvalidArgument: not an .npy, or of another shape or type.
    """
    try:
        loaded = load_array(path)
    except HoldsObjects as error:
        raise InvalidArgument(f"{path} must have one vector, or a matrix: {error}", pointer="/vector") from error
    except ValueError as error:
        raise InvalidArgument(f"{path} is not an .npy file: {error}", pointer="/vector") from error
    if loaded.ndim not in (1, 2) or loaded.dtype.kind not in "fiu":
        raise InvalidArgument(f"{path} must have one vector, or a matrix of one per row", pointer="/vector")
    return np.atleast_2d(loaded).astype(np.float32)


def _current(client: Client, name: str) -> str:
    current = client.gallery(name).current
    if current is None:
        raise InvalidArgument(f"{name} has no current version; give --version for the vectors", pointer="/version")
    return current


def _print_matches(matches: Sequence[Match], with_text: bool) -> None:
    rows = [[m.id, f"{m.score:.4f}", m.version, "+".join(m.route) or "same", m.metadata] for m in matches]
    titles = ["item", "score", "version", "route", "metadata"]
    if with_text:
        titles, rows = [*titles, "text"], [[*row, m.text or ""] for row, m in zip(rows, matches, strict=True)]
    if rows:
        print_table(titles, rows)
    else:
        out.print("no matches")


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
    out.print(f"score mode {mode}")
    print_table(["shard", "items", "route", "measured", "calibrated", "ms"], rows)


def _measured(edge: EdgeUsed) -> str:
    scores = [f"{name} {score.value:.3f}" for name, score in edge.scores.items()]
    return f"{edge.new} > {edge.old}: {' '.join(scores) or 'nothing'}"
