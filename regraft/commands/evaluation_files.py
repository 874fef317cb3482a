"""Files of an evaluation set of embeddings: one file a version, or one with all versions and the labels in it."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from index.errors import InvalidArgument
from regraft import given
from regraft.commands.options import needs

LABELS, LABEL, VECTOR = "labels", "label", "vector:"
"""The array of an .npz, the column of a table, and what begins the names of an export's columns of vectors."""
ALL_IN_ONE = {".npz", ".parquet"}
Read = tuple[dict[str, list[Any]], list[dict[str, Any]]]
"""Embeddings by version, and an entry for each row, with its label if it has one."""


def read_evaluation(files: Sequence[Path], versions: Sequence[str], labels: Path | None) -> Read:
    """A set of embeddings out of files.

    One file without a version holds them all: an .npz with an array for each version, by its name, and `labels` (N,);
    or a Parquet file with a column of vectors for each, NAME or `vector:NAME`, and a column `label`.

    Raises:
        typer.BadParameter: not one version for each file, or files of different lengths.
        InvalidArgument: a file that cannot be read so.
    """
    if len(files) == 1 and not versions and files[0].suffix.lower() in ALL_IN_ONE:
        held, own = _table(files[0]) if files[0].suffix.lower() == ".parquet" else _archive(files[0])
        checked = {name: given.vectors(rows, f"{files[0]}, {name}") for name, rows in held.items()}
    else:
        checked, own = _sets(files, versions), None
    count = _same_length(checked)
    if own is None or labels is not None:
        return checked, _labelled(labels, count)
    if len(own) != count:
        raise InvalidArgument(f"{files[0]} holds {len(own)} labels for {count} embeddings")
    return checked, [{} if label is None else {"label": label} for label in own]


def _archive(path: Path) -> tuple[Mapping[str, Any], list[Any] | None]:
    arrays = _arrays(path)
    own = arrays.pop(LABELS).tolist() if LABELS in arrays else None
    if not arrays:
        raise InvalidArgument(f"{path} holds no array of embeddings, which has the name of its version")
    return arrays, own


def _table(path: Path) -> tuple[Mapping[str, Any], list[Any] | None]:
    with needs("arrow"):
        import pyarrow as pa
        import pyarrow.parquet as pq
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise InvalidArgument(f"{path} cannot be read as Parquet: {error}") from error
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    vectors = [field.name for field in table.schema if any(is_list(field.type) for is_list in lists)]
    if not vectors:
        raise InvalidArgument(f"{path} has no column of vectors, which has the name of its version")
    own = table.column(LABEL).to_pylist() if LABEL in table.column_names else None
    return {name.removeprefix(VECTOR): table.column(name).to_pylist() for name in vectors}, own


def _sets(files: Sequence[Path], versions: Sequence[str]) -> dict[str, list[Any]]:
    if len(files) != len(versions) or len(set(versions)) < len(versions):
        why = (
            f"{len(files)} files of embeddings need as many versions, each once; given: {', '.join(versions) or 'none'}"
        )
        raise typer.BadParameter(why, param_hint="--version")
    return {version: _read_embeddings(path, version) for path, version in zip(files, versions, strict=True)}


def _same_length(held: Mapping[str, Sequence[Any]]) -> int:
    if len({len(rows) for rows in held.values()}) > 1:
        counts = ", ".join(f"{version}: {len(rows)}" for version, rows in held.items())
        raise typer.BadParameter(f"each file needs one embedding for each entry ({counts})", param_hint="--embeddings")
    return len(next(iter(held.values())))


def _labelled(path: Path | None, count: int) -> list[dict[str, Any]]:
    """An entry for each of `count` embeddings, with its label of a JSON list."""
    if path is None:
        return [{} for _ in range(count)]
    labels = _json(path, "labels")
    if not isinstance(labels, list) or len(labels) != count:
        found = f"a list of {len(labels)}" if isinstance(labels, list) else f"of type {type(labels).__name__}"
        raise InvalidArgument(f"{path} must be a JSON list of {count} labels, one for each embedding; it is {found}")
    return [{"label": label} for label in labels]


def _read_embeddings(path: Path, version: str) -> list[Any]:
    """The rows (N, dim) of a file; of an .npz those of the array that has the version's name, or of its only one."""
    if path.suffix.lower() == ".json":
        rows = _json(path, "embeddings")
    elif path.suffix.lower() in {".npy", ".npz"}:
        rows = _array(path, version)
    else:
        raise InvalidArgument(f"{path}: embeddings are read from .npy, .npz or .json files")
    checked: list[Any] = given.vectors(rows, str(path))
    if not checked:
        raise InvalidArgument(f"{path} holds no embeddings")
    return checked


def _array(path: Path, version: str) -> Any:
    held = _arrays(path)
    name = next(iter(held)) if len(held) == 1 else version
    if name not in held:
        raise InvalidArgument(f"{path} holds no array {version!r}; it has: {', '.join(held)}")
    return held[name]


def _arrays(path: Path) -> dict[str, Any]:
    """Every array of an .npz; of an .npy its only one."""
    import numpy as np

    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return {"": loaded}
        with loaded:
            return {name: loaded[name] for name in loaded.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise InvalidArgument(f"{path} cannot be read as embeddings: {error}") from error


def _json(path: Path, what: str) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path} cannot be read as {what}: {error}") from error
