"""Images and texts as they were given, in any store fsspec knows.

A key is written once, never changed, and named by one row; that of a text says so.

Blobs are written before the transaction that refers to them and removed after the one that stops; a crash in between
leaves an orphan, never a row without its image. A marker tells the store from an empty place, such as the folder that a
disk which is not mounted leaves behind: only where it lies does an image that is not found mean anything.
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
from service.store.object_store import FOLDERS, VECTOR_FILES, is_silence, one_kind_of_error, open_store

logger = logging.getLogger(__name__)

T = TypeVar("T")

MARKER = ".regraft-store"
IMAGES = repeat("")
"""The kinds of contents that are images all."""
AT_ONCE = 16
"""Images on their way to or from a store over the network: one after the other would wait for each."""


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

    def __init__(self, url: str, named: Callable[[], Sequence[str]]) -> None:
        """Open a store without looking at it.

        Args:
            url: where it is.
            named: some of the keys that rows name now, none if no row does. A place without marker becomes the store
                when it holds one of them, or when there are none.
        """
        self._store, self._root = open_store(url)
        self._local = "file" in self._store.protocol
        self._named = named
        self._away: str | None = None
        self._refusing: str | None = None

    @property
    def problem(self) -> str | None:
        """Why the store was out of reach when last needed, or took nothing when last written to; None: neither."""
        # One that may be read and not written answers reads.
        return self._away or self._refusing

    def write(self, gallery_id: int, contents: Iterable[bytes], kinds: Iterable[str] = IMAGES) -> list[str]:
        """Store images, or texts where their kind is `blob_keys.TEXT`, durably and return their keys, in order.

        Raises:
            StorageFull, StoreUnreachable: nothing is stored.
        """
        self.check()
        folder = Path(self._path(str(gallery_id)))
        keys: list[str] = []
        with self._taking(keys):
            if self._local:
                folder.mkdir(exist_ok=True)
            with _Sending(1 if self._local else AT_ONCE) as sending:
                for content, kind in zip(contents, kinds, strict=False):
                    keys.append(f"{gallery_id}/{uuid.uuid4().hex}{kind}")
                    sending.add(self._put, keys[-1], content)
            if self._local:
                sync_all([Path(self._path(key)) for key in keys])
                sync_all([folder, folder.parent])
        return keys

    def put(self, key: str, content: bytes) -> None:
        """Store a file durably by a key that was never used. Raises StorageFull, StoreUnreachable."""
        self.check()
        path = Path(self._path(key))
        with self._taking([key]):
            if self._local:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._put(key, content)
            if self._local:
                above = path.parents[: key.count("/") + 1]
                sync_all([path, *above])

    @contextmanager
    def _taking(self, keys: Iterable[str]) -> Iterator[None]:
        """Nothing of these keys stays if anything fails."""
        try:
            yield
        except BaseException as error:
            self.remove(keys)
            if is_full(error):
                raise StorageFull(f"the image store {self._where} takes no more images: {error}") from error
            if isinstance(error, OSError):
                refusing = f"the image store {self._where} does not take images: {error}"
                if not isinstance(error, FileNotFoundError):  # the gallery and its folder were deleted meanwhile
                    self._refusing = refusing
                raise StoreUnreachable(refusing) from error
            raise
        self._refusing = None

    def read(self, key: str) -> bytes:
        """The image of a key.

        Raises:
            FileNotFoundError: the store is there, and the image is not.
            OSError: the store is there, and does not give the image.
            StoreUnreachable: nothing can be said of the image.
        """
        try:
            image = self._read(key)
        except OSError as error:
            self._look_after(error)
        else:
            self._away = None
            return image
        # The store answers, but it may have come back only since.
        return self._read(key)

    def read_part(self, key: str, start: int, end: int) -> bytes | None:
        """The bytes of a file from one place up to another, as many as there are; None: the file is gone.

        Raises:
            StoreUnreachable: nothing can be said of it, or the store does not give it.
        """
        try:
            return self._read(key, start, end)
        except OSError as error:
            self._look_after(error)
        try:  # the store answers, but it may have come back only since
            return self._read(key, start, end)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreUnreachable(f"the image store {self._where} does not give {key!r}: {error}") from error

    def fetch(self, key: str) -> bytes | None:
        """The image of a key, None when it is gone. Raises StoreUnreachable, ImageUnreadable."""
        try:
            return self.read(key)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ImageUnreadable(f"the image store {self._where} does not give image {key!r}: {error}") from error

    def read_all(self, keys: Iterable[str]) -> Iterator[Callable[[], bytes]]:
        """For each key, in order, a call that returns or raises what `read` does; see `_ahead`."""
        return self._ahead(self.read, keys)

    def fetch_all(self, keys: Iterable[str]) -> Iterator[bytes | None]:
        """`fetch` of each, in order; the first that raises ends it."""
        with closing(self._ahead(self.fetch, keys)) as results:
            yield from (result() for result in results)

    def _ahead(self, read: Callable[[str], T], keys: Iterable[str]) -> Generator[Callable[[], T]]:
        """The results of reading keys; over a network the next ones are on their way while one is used."""
        if self._local:
            yield from (partial(read, key) for key in keys)
            return
        under_way: deque[Future[T]] = deque()
        with ThreadPoolExecutor(AT_ONCE, "blobs") as pool:
            for key in keys:
                if len(under_way) == AT_ONCE:
                    yield under_way.popleft().result
                under_way.append(pool.submit(read, key))
            while under_way:
                yield under_way.popleft().result

    def check(self) -> None:
        """Raise StoreUnreachable unless the store answers. A place that is to become the store is given its marker."""
        try:
            try:
                self._read(MARKER)
            except FileNotFoundError:
                self._mark()
        except OSError as error:
            raise self._lost(error) from error
        self._away = None

    def _look_after(self, error: OSError) -> None:
        """Raise StoreUnreachable unless the store answers, though it just raised this."""
        if is_silence(error):
            raise self._lost(error) from error
        self.check()

    def _lost(self, error: OSError) -> StoreUnreachable:
        before, self._away = self._away, f"the image store {self._where} is out of reach: {error}"
        if before is None:
            logger.error(Event("store_lost", reason=self._away))
        return StoreUnreachable(self._away)

    def _mark(self) -> None:
        named = self._named()
        if named and not any(self.exists(key) for key in named):
            raise FileNotFoundError(
                f"neither its marker nor any image is there (lost for good? put an empty file {MARKER} there)"
            )
        with one_kind_of_error():
            self._store.makedirs(self._root, exist_ok=True)
            self._store.pipe_file(self._path(MARKER), b"")
        if self._local:
            sync_all([Path(self._path(MARKER)), Path(self._root)])

    def _put(self, key: str, content: bytes) -> None:
        with one_kind_of_error():
            self._store.pipe_file(self._path(key), content)

    def _read(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        with one_kind_of_error():
            return bytes(self._store.cat_file(self._path(key), start=start, end=end))

    def exists(self, key: str) -> bool:
        """Whether there is an image of this key."""
        return bool(self._store.exists(self._path(key)))

    def all(self) -> Iterator[tuple[str, float]]:
        """Every key of an image or text, with its age in seconds; a store that does not tell the age says 0.

        Files of others may lie beside them: those are not told of.
        """
        return ((key, age) for key, age in self._all("") if is_content(key))

    def all_vector_files(self) -> Iterator[tuple[str, float]]:
        """The same of files of vectors."""
        return ((key, age) for key, age in self._all(VECTOR_FILES) if is_vector_file(key))

    def all_folders(self) -> Iterator[tuple[str, float]]:
        """The same of folders of versions and edges, see `folder_store`."""
        return ((key, age) for key, age in self._all(FOLDERS) if is_folder(key))

    def _all(self, below: str) -> Iterator[tuple[str, float]]:
        place, now = self._path(below).rstrip("/"), time.time()
        for path, written in self._files_here(place) if self._local else self._files_there(place):
            seconds = now if written is None else written if isinstance(written, (int, float)) else written.timestamp()
            yield path.removeprefix(self._root).lstrip("/"), max(now - float(seconds), 0.0)

    def _files_here(self, folder: str) -> Iterator[tuple[str, Any]]:
        """Every file below a folder, and when it was written; one after the other, for there may be many."""
        with suppress(FileNotFoundError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir():
                    yield from self._files_here(entry.path)
                else:
                    with suppress(FileNotFoundError):
                        yield entry.path, entry.stat().st_mtime

    def _files_there(self, place: str) -> Iterator[tuple[str, Any]]:
        """The same of a store over the network, which lists a gallery's in one piece."""
        # What such a store says of a place depends on what lies there: it is not asked whether it exists.
        with suppress(FileNotFoundError):
            for found in self._store.ls(place, detail=True):
                name, folder = found["name"], found["type"] == "directory"
                for path, details in (self._store.find(name, detail=True) if folder else {name: found}).items():
                    yield str(path), details.get("mtime") or details.get("LastModified")

    def remove(self, keys: Iterable[str]) -> None:
        """Remove images; one that cannot be removed is logged and left as an orphan."""
        with _Sending(1 if self._local else AT_ONCE) as sending:
            for key in keys:
                sending.add(self._remove, key)

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
    def _where(self) -> str:
        """What a user knows it by; the URL itself may hold a password."""
        protocol = self._store.protocol
        return f"{protocol if isinstance(protocol, str) else protocol[0]}://{self._root}"

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"


class _Sending:
    """Work of which so much goes on at a time; the first that fails ends the rest, and is raised."""

    def __init__(self, at_once: int) -> None:
        self._pool = ThreadPoolExecutor(at_once, "blobs") if at_once > 1 else None
        self._at_once = at_once
        self._under_way: list[Future[None]] = []

    def __enter__(self) -> Self:
        return self

    def add(self, work: Callable[..., None], *args: object) -> None:
        """Begin one more, once there is room: what is given as it comes is not all in memory."""
        if self._pool is None:
            work(*args)
            return
        if len(self._under_way) >= self._at_once:
            self._under_way.pop(0).result()
        self._under_way.append(self._pool.submit(work, *args))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """All of them have ended: nothing is written any more behind whoever cleans up."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            for one in self._under_way if kind is None else ():
                one.result()
