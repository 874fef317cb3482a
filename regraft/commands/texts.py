"""Read texts as items from `.txt` and `.jsonl` files, for `regraft ingest`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from index.errors import InvalidArgument
from regraft.client import InvalidInput, TextItem
from regraft.commands.item_files import below, by_id, label_of
from regraft.inputs import as_json

TEXT, LINES = ".txt", ".jsonl"
FIELDS = {"id", "text", "metadata"}
BATCH_CHARACTERS = 4 << 20
"""Characters of a request, not counting its last text."""


def are_texts(paths: Sequence[Path]) -> bool:
    """Whether these are files of texts. Raises InvalidArgument if only some are."""
    kinds = {path.suffix.lower() in (TEXT, LINES) and not path.is_dir() for path in paths}
    if len(kinds) > 1:
        raise InvalidArgument("images and files of texts (.txt, .jsonl) cannot be ingested together")
    return kinds == {True}


def find_texts(paths: Sequence[Path], prefix: str, refuse: Callable[[InvalidArgument], object]) -> Iterator[TextItem]:
    """The texts of .jsonl files (their lines) and .txt files, whose ids are their paths below a given folder.

    `refuse` is called for each line that is not a text, each .txt file that cannot be read, and each text that no
    request can carry, as with NaN in its metadata; the others follow.

    Raises:
        InvalidArgument: at once if a path does not exist or has no texts, or two files have the same id; later if the
            first line of a .jsonl file is not a text, and so probably none is.
    """
    files = by_id((key, file) for path in paths for key, file in _files(path))
    return chain.from_iterable(_texts_of(key, file, prefix, refuse) for key, file in files.items())


def _files(path: Path) -> Iterator[tuple[str, Path]]:
    """Id -> file for the files of texts at or below a path; a .jsonl file, whose lines have ids, by its path."""
    found = below(path, [TEXT])
    if not found:
        raise InvalidArgument(f"{path} has no {TEXT} files")
    for file in found:
        if file.suffix.lower() == LINES:
            yield str(file), file
        else:
            yield (file.relative_to(path).as_posix() if path.is_dir() else file.name), file


def _texts_of(key: str, file: Path, prefix: str, refuse: Callable[[InvalidArgument], object]) -> Iterator[TextItem]:
    if file.suffix.lower() == LINES:
        yield from _lines(file, prefix, refuse)
        return
    try:
        item = _sendable(TextItem(prefix + key, _text(file), {"label": label_of(file)}), str(file))
    except InvalidArgument as error:
        refuse(error)
    else:
        yield item


def _text(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{file} cannot be read as UTF-8: {error}") from error


def _lines(path: Path, prefix: str, refuse: Callable[[InvalidArgument], object]) -> Iterator[TextItem]:
    first = True
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                value = _parsed(line, where)
                item = _sendable(TextItem(prefix + value["id"], value["text"], value.get("metadata")), where)
            except InvalidArgument as error:
                if first:
                    raise
                refuse(error)
            else:
                yield item
            first = False


def _parsed(line: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{where}: not valid JSON: {error}") from error
    if not isinstance(value, dict) or not {"id", "text"} <= value.keys() <= FIELDS:
        raise InvalidArgument(f"{where}: the line must be an object of id, text and optionally metadata")
    if not isinstance(value["id"], str) or not isinstance(value["text"], str):
        raise InvalidArgument(f"{where}: id and text must be strings")
    if not isinstance(value.get("metadata"), dict | None):
        raise InvalidArgument(f"{where}: metadata must be an object")
    return value


def _sendable(item: TextItem, where: str) -> TextItem:
    """The same item. Raises InvalidArgument if no request can carry it."""
    try:
        as_json([item.id, item.text, item.metadata], ascii_only=False).encode()
    except (InvalidInput, UnicodeEncodeError) as error:
        why = error.__cause__ if isinstance(error, InvalidInput) else error
        raise InvalidArgument(f"{where}: it cannot be sent, as a value is not finite or not UTF-8: {why}") from error
    return item


def batches_of_texts(items: Iterable[TextItem], size: int) -> Iterator[list[TextItem]]:
    """Batches of up to `size` texts, fewer if they are long."""
    left = iter(items)
    while chunk := list(islice(left, 1)):
        characters = len(chunk[0].text)
        while len(chunk) < size and characters < BATCH_CHARACTERS and (more := next(left, None)) is not None:
            chunk.append(more)
            characters += len(more.text)
        yield chunk
