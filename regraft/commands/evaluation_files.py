"""`read_evaluation`: read a set of embeddings from one file per version, or one file with all versions and labels."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from index.errors import InvalidArgument
from regraft import inputs
from regraft.terminal.extras import needs

LABELS, LABEL, RELEVANT, VECTOR = "labels", "label", "relevant", "vector:"
"""The array of an .npz, two columns of a table, and what begins the names of an export's columns of vectors."""
LINES = ".jsonl"
ALL_IN_ONE = {".npz", ".parquet"}
Read = tuple[dict[str, list[Any]], list[dict[str, Any]]]
"""Version -> embeddings, and an entry per row, with its label if any."""


def read_evaluation(
    files: Sequence[Path], versions: Sequence[str], labels: Path | None, relevant: Path | None = None
) -> Read:
    """Read a set of embeddings from files.

    A single file without a version has all versions: an .npz with an array per version, by its name, and `labels` (N,);
    or a Parquet file with a column of vectors per version, NAME or `vector:NAME`, and a column `label`, or `relevant`
    with lists of ids. `labels` and `relevant`: files of JSON lists with an entry per embedding.

    Raises:
        typer.BadParameter: not one version per file, or files of different lengths.
        InvalidArgument: a file cannot be read.
    """
    if len(files) == 1 and not versions and files[0].suffix.lower() in ALL_IN_ONE:
        held, own = _table(files[0]) if files[0].suffix.lower() == ".parquet" else _archive(files[0])
        checked = {name: inputs.vectors(rows, f"{files[0]}, {name}") for name, rows in held.items()}
    else:
        checked, own = _sets(files, versions), {}
    count = _same_length(checked)
    own |= {name: _listed(path, name, count) for name, path in ((LABEL, labels), (RELEVANT, relevant)) if path}
    for name, values in own.items():
        if len(values) != count:
            raise InvalidArgument(f"{files[0]} has {len(values)} values of {name} for {count} embeddings")
    return checked, [{name: values[n] for name, values in own.items() if values[n] is not None} for n in range(count)]


def read_lines(path: Path) -> tuple[list[dict[str, Any]], list[Path]]:
    """The entries of a .jsonl file, each a text, or an image by its path from the file on; and these paths.

    Raises:
        InvalidArgument: a line is none, or some are images and others texts; names it.
    """
    entries: list[dict[str, Any]] = []
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # not `splitlines`: a text may have U+2028 or U+0085
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{path} cannot be read: {error}") from error
    for number, line in ((number, line) for number, line in enumerate(lines, 1) if line.strip()):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(f"{path}, line {number} is not valid JSON: {error}") from error
        if not isinstance(entry, dict) or ("text" in entry) is ("image" in entry):
            raise InvalidArgument(f"{path}, line {number}: an entry must be an object with either text or image")
        if "image" in entry and not (path.parent / str(entry["image"])).is_file():
            raise InvalidArgument(f"{path}, line {number}: the file {entry['image']} does not exist")
        entries.append(entry)
    images = [path.parent / str(entry.pop("image")) for entry in entries if "image" in entry]
    if images and len(images) < len(entries):
        raise InvalidArgument(f"{path} has images and texts; a set must have only one of them")
    return entries, images


def _archive(path: Path) -> tuple[Mapping[str, Any], dict[str, list[Any]]]:
    arrays = _arrays(path)
    labels = arrays.pop(LABELS, None)
    if labels is not None and labels.ndim != 1:
        raise InvalidArgument(f"{path}: {LABELS} must have one per embedding (N,), not the shape {labels.shape}")
    own = {} if labels is None else {LABEL: labels.tolist()}
    if not arrays:
        raise InvalidArgument(f"{path} has no array of embeddings named after its version")
    return arrays, own


def _table(path: Path) -> tuple[Mapping[str, Any], dict[str, list[Any]]]:
    with needs("arrow"):
        import pyarrow as pa
        import pyarrow.parquet as pq
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise InvalidArgument(f"{path} cannot be read as Parquet: {error}") from error
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    vectors = [f.name for f in table.schema if f.name != RELEVANT and any(is_list(f.type) for is_list in lists)]
    if not vectors:
        raise InvalidArgument(f"{path} has no column of vectors named after its version")
    own = {name: table.column(name).to_pylist() for name in (LABEL, RELEVANT) if name in table.column_names}
    return {name.removeprefix(VECTOR): table.column(name).to_pylist() for name in vectors}, own


def _sets(files: Sequence[Path], versions: Sequence[str]) -> dict[str, list[Any]]:
    if len(files) != len(versions) or len(set(versions)) < len(versions):
        why = f"{len(files)} files require as many different versions; given: {', '.join(versions) or 'none'}"
        raise typer.BadParameter(why, param_hint="--version")
    return {version: _read_embeddings(path, version) for path, version in zip(files, versions, strict=True)}


def _same_length(held: Mapping[str, Sequence[Any]]) -> int:
    if len({len(rows) for rows in held.values()}) > 1:
        counts = ", ".join(f"{version}: {len(rows)}" for version, rows in held.items())
        raise typer.BadParameter(
            f"all files must have the same number of embeddings ({counts})", param_hint="--embeddings"
        )
    return len(next(iter(held.values())))


def _listed(path: Path, what: str, count: int) -> list[Any]:
    """Read a JSON list of `count` values."""
    values, told = _json(path, what), "labels" if what == LABEL else "lists of ids"
    if not isinstance(values, list) or len(values) != count:
        found = f"a list of {len(values)}" if isinstance(values, list) else f"of type {type(values).__name__}"
        raise InvalidArgument(f"{path} must be a JSON list of {count} {told}, one for each embedding, not {found}")
    return values


def _read_embeddings(path: Path, version: str) -> list[Any]:
    """The rows (N, dim) of a file; in an .npz of the array with the version's name, else of the only one."""
    if path.suffix.lower() == ".json":
        rows = _json(path, "embeddings")
    elif path.suffix.lower() in {".npy", ".npz"}:
        rows = _array(path, version)
    else:
        raise InvalidArgument(f"{path} must be an .npy, .npz or .json file")
    checked: list[Any] = inputs.vectors(rows, str(path))
    if not checked:
        raise InvalidArgument(f"{path} has no embeddings")
    return checked


def _array(path: Path, version: str) -> Any:
    held = _arrays(path)
    name = next(iter(held)) if len(held) == 1 else version
    if name not in held:
        raise InvalidArgument(f"{path} has no array {version!r}, only: {', '.join(held)}")
    return held[name]


def _arrays(path: Path) -> dict[str, Any]:
    """The arrays of an .npz, or that of an .npy."""
    import numpy as np

    from index.numpy_file import opened

    try:
        with opened(path) as held:
            return {"": held} if isinstance(held, np.ndarray) else {name: held[name] for name in held.files}
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{path} cannot be read as embeddings: {error}") from error


def _json(path: Path, what: str) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path} cannot be read as {what}: {error}") from error
