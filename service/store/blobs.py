"""Images and texts as they were given, in any store that fsspec knows.

A key is written once, never changed, and referred to by one row; a text's key ends in `.txt`.

Blobs are written before the transaction that refers to them and removed after the one that stops; a crash in between
leaves an orphan, never a row without its image. A marker file distinguishes the store from an empty folder, such as the
mount point of a disk that is not mounted: only with the marker there is an image that is not found a lost one.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, Self, TypeVar

from index.durable import sync_all
from index.errors import RegraftError
from index.events import Event
from service.errors import StorageFull
from service.store.blob_keys import is_content, is_folder, is_vector_file
from service.store.faults import is_full
from service.store.object_store import FOLDERS, VECTOR_FILES, as_os_errors, is_timeout, open_store

logger = logging.getLogger(__name__)

T = TypeVar("T")

MARKER = ".regraft-store"
IMAGES = repeat("")
"""The kinds of contents of which all are images."""
MAX_PARALLEL = 16
"""Concurrent requests to a store over the network: one after the other would wait for each."""


class StoreUnreachable(RegraftError):
    """The image store is out of reach."""

    status = 503
    code = "store_unreachable"


class ImageUnreadable(RegraftError):
    """The store answers and holds the image, but does not give it."""

    status = 503
    code = "image_unreadable"


class Blobs:
    """The images of all galleries."""

    def __init__(self, url: str, known_keys: Callable[[], Sequence[str]]) -> None:
        """Open a store without a request to it.

        Args:
            url: of the store.
            known_keys: returns some of the keys that rows refer to, none if no row does. A place without marker becomes
                the store when it holds one of them, or when there are none.
        """
        self._store, self._root = open_store(url)
        self._local = "file" in self._store.protocol
        self._known_keys = known_keys
        self._outage: str | None = None
        self._write_problem: str | None = None

    @property
    def problem(self) -> str | None:
        """Why the last request failed as the store was out of reach, or the last write was refused; None: neither."""
        # A store may refuse writes and still answer reads.
        return self._outage or self._write_problem

    def write(self, gallery_id: int, contents: Iterable[bytes], kinds: Iterable[str] = IMAGES) -> list[str]:
        """Store images, or texts where the kind is `blob_keys.TEXT`, durably, and return their keys, in order.

        Raises:
            StorageFull, StoreUnreachable: nothing is stored.
        """
        self.check()
        folder = Path(self._path(str(gallery_id)))
        keys: list[str] = []
        with self._writing(keys):
            if self._local:
                folder.mkdir(exist_ok=True)
            with _Parallel(1 if self._local else MAX_PARALLEL) as parallel:
                for content, kind in zip(contents, kinds, strict=False):
                    keys.append(f"{gallery_id}/{uuid.uuid4().hex}{kind}")
                    parallel.add(self._put, keys[-1], content)
            if self._local:
                sync_all([Path(self._path(key)) for key in keys])
                sync_all([folder, folder.parent])
        return keys

    def put(self, key: str, content: bytes) -> None:
        """Store a file durably by a key that was never used. Raises StorageFull, StoreUnreachable."""
        self.check()
        path = Path(self._path(key))
        with self._writing([key]):
            if self._local:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._put(key, content)
            if self._local:
                above = path.parents[: key.count("/") + 1]
                sync_all([path, *above])

    @contextmanager
    def _writing(self, keys: Iterable[str]) -> Iterator[None]:
        """Context of writing keys: they are removed if anything fails."""
        try:
            yield
        except BaseException as error:
            self.remove(keys)
            if is_full(error):
                raise StorageFull(f"the image store {self._public_url} is full: {error}") from error
            if isinstance(error, OSError):
                problem = f"the image store {self._public_url} cannot be written: {error}"
                if not isinstance(error, FileNotFoundError):  # the gallery and its folder were deleted meanwhile
                    self._write_problem = problem
                raise StoreUnreachable(problem) from error
            raise
        self._write_problem = None

    def read(self, key: str) -> bytes:
        """The image of a key.

        Raises:
            FileNotFoundError: the store answers, and has no such image.
            OSError: the store answers, but does not return the image.
            StoreUnreachable: the store does not answer.
        """
        try:
            image = self._read(key)
        except OSError as error:
            self._check_after(error)
        else:
            self._outage = None
            return image
        # The store answers, but it may have come back only since.
        return self._read(key)

    def read_part(self, key: str, start: int, end: int) -> bytes | None:
        """The bytes of a file from `start` up to `end`, or its end; None: the file is gone.

        Raises:
            StoreUnreachable: the store does not answer, or does not return the file.
        """
        try:
            return self._read(key, start, end)
        except OSError as error:
            self._check_after(error)
        try:  # the store answers, but it may have come back only since
            return self._read(key, start, end)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreUnreachable(f"the image store {self._public_url} cannot read {key!r}: {error}") from error

    def fetch(self, key: str) -> bytes | None:
        """The image of a key, None when it is gone. Raises StoreUnreachable, ImageUnreadable."""
        try:
            return self.read(key)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ImageUnreadable(f"the image store {self._public_url} cannot read image {key!r}: {error}") from error

    def read_all(self, keys: Iterable[str]) -> Iterator[Callable[[], bytes]]:
        """For each key, in order, a call that returns or raises what `read` does; see `_prefetched`."""
        return self._prefetched(self.read, keys)

    def fetch_all(self, keys: Iterable[str]) -> Iterator[bytes | None]:
        """`fetch` of each, in order; the first that raises ends it."""
        with closing(self._prefetched(self.fetch, keys)) as results:
            yield from (result() for result in results)

    def _prefetched(self, read: Callable[[str], T], keys: Iterable[str]) -> Generator[Callable[[], T]]:
        """The results of reading keys; over a network the next ones are requested while one is used."""
        if self._local:
            yield from (partial(read, key) for key in keys)
            return
        under_way: deque[Future[T]] = deque()
        with ThreadPoolExecutor(MAX_PARALLEL, "blobs") as pool:
            for key in keys:
                if len(under_way) == MAX_PARALLEL:
                    yield under_way.popleft().result
                under_way.append(pool.submit(read, key))
            while under_way:
                yield under_way.popleft().result

    def check(self) -> None:
        """Raise StoreUnreachable unless the store answers. Writes the marker where a place becomes the store."""
        try:
            try:
                self._read(MARKER)
            except FileNotFoundError:
                self._write_marker()
        except OSError as error:
            raise self._outage_error(error) from error
        self._outage = None

    def _check_after(self, error: OSError) -> None:
        """Check the store after this error. Raises StoreUnreachable unless it answers."""
        if is_timeout(error):
            raise self._outage_error(error) from error
        self.check()

    def _outage_error(self, error: OSError) -> StoreUnreachable:
        before, self._outage = self._outage, f"the image store {self._public_url} is unreachable: {error}"
        if before is None:
            logger.error(Event("store_lost", reason=self._outage))
        return StoreUnreachable(self._outage)

    def _write_marker(self) -> None:
        known_keys = self._known_keys()
        if known_keys and not any(self.exists(key) for key in known_keys):
            raise FileNotFoundError(
                f"it has neither its marker nor any image (if they are lost, create an empty file {MARKER} there)"
            )
        with as_os_errors():
            self._store.makedirs(self._root, exist_ok=True)
            self._store.pipe_file(self._path(MARKER), b"")
        if self._local:
            sync_all([Path(self._path(MARKER)), Path(self._root)])

    def _put(self, key: str, content: bytes) -> None:
        with as_os_errors():
            self._store.pipe_file(self._path(key), content)

    def _read(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        with as_os_errors():
            return bytes(self._store.cat_file(self._path(key), start=start, end=end))

    def exists(self, key: str) -> bool:
        """Whether there is an image of this key."""
        return bool(self._store.exists(self._path(key)))

    def all(self) -> Iterator[tuple[str, float]]:
        """Every key of an image or text, with its age in seconds; 0 where the store does not tell it.

        Other files in the store are left out.
        """
        return ((key, age) for key, age in self._all("") if is_content(key))

    def all_vector_files(self) -> Iterator[tuple[str, float]]:
        """Every key of a file of vectors, with its age in seconds."""
        return ((key, age) for key, age in self._all(VECTOR_FILES) if is_vector_file(key))

    def all_folders(self) -> Iterator[tuple[str, float]]:
        """Every key of a folder of a version or edge, with its age in seconds, see `folder_store`."""
        return ((key, age) for key, age in self._all(FOLDERS) if is_folder(key))

    def _all(self, below: str) -> Iterator[tuple[str, float]]:
        place, now = self._path(below).rstrip("/"), time.time()
        for path, written in self._local_files(place) if self._local else self._remote_files(place):
            seconds = now if written is None else written if isinstance(written, (int, float)) else written.timestamp()
            yield path.removeprefix(self._root).lstrip("/"), max(now - float(seconds), 0.0)

    def _local_files(self, folder: str) -> Iterator[tuple[str, Any]]:
        """Every file below a folder, and when it was written; lazily, for there may be many."""
        with suppress(FileNotFoundError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir():
                    yield from self._local_files(entry.path)
                else:
                    with suppress(FileNotFoundError):
                        yield entry.path, entry.stat().st_mtime

    def _remote_files(self, place: str) -> Iterator[tuple[str, Any]]:
        """Every file of a store over the network, and when it was written; each gallery's files in one listing."""
        # Not `exists` first: what such a store answers for a folder depends on its content.
        with suppress(FileNotFoundError):
            for found in self._store.ls(place, detail=True):
                name, folder = found["name"], found["type"] == "directory"
                for path, details in (self._store.find(name, detail=True) if folder else {name: found}).items():
                    yield str(path), details.get("mtime") or details.get("LastModified")

    def remove(self, keys: Iterable[str]) -> None:
        """Remove images; one that cannot be removed is logged and left as an orphan."""
        with _Parallel(1 if self._local else MAX_PARALLEL) as parallel:
            for key in keys:
                parallel.add(self._remove, key)

    def _remove(self, key: str) -> None:
        try:
            self._store.rm_file(self._path(key))
        except FileNotFoundError:
            pass
        except Exception:
            logger.warning(Event("blob_orphaned", key=key), exc_info=True)

    def remove_gallery(self, gallery_id: int) -> None:
        """Remove every image of a gallery."""
        try:
            self._store.rm(self._path(str(gallery_id)), recursive=True)
        except FileNotFoundError:
            pass
        except Exception:
            logger.warning(Event("blobs_orphaned", gallery=gallery_id), exc_info=True)

    @property
    def _public_url(self) -> str:
        """The store's URL for messages, without credentials."""
        protocol = self._store.protocol
        return f"{protocol if isinstance(protocol, str) else protocol[0]}://{self._root}"

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"


class _Parallel:
    """Runs so many calls at a time; the first that fails ends the rest, and is raised."""

    def __init__(self, at_once: int) -> None:
        self._pool = ThreadPoolExecutor(at_once, "blobs") if at_once > 1 else None
        self._at_once = at_once
        self._under_way: list[Future[None]] = []

    def __enter__(self) -> Self:
        return self

    def add(self, work: Callable[..., None], *args: object) -> None:
        """Start one more call once there is room, so that lazily produced arguments are not all in memory."""
        if self._pool is None:
            work(*args)
            return
        if len(self._under_way) >= self._at_once:
            self._under_way.pop(0).result()
        self._under_way.append(self._pool.submit(work, *args))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait until all calls have ended: nothing is written after a caller cleans up."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            for one in self._under_way if kind is None else ():
                one.result()
