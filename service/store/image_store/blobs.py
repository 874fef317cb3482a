"""Images and texts, stored unchanged, in any store that fsspec supports; see `Blobs`.

A key is written once, never changed, and referred to by one row; a text's key ends in `.txt`.

Blobs are written before the transaction that refers to them, and removed after the one that removes the reference, so a
crash in between leaves an orphan, never a row without its image. A marker file distinguishes the store from an empty
folder, such as the mount point of a disk that is not mounted, and from the store of another database: only if it names
this one, a missing image counts as lost, and an image without a row as an orphan.
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
from typing import Any, TypeVar

from index.durable import sync_all
from index.errors import RegraftError
from index.events import Event
from service.errors import StorageFull
from service.store.faults import is_full
from service.store.image_store.keys import is_content, is_folder, is_vector_file
from service.store.image_store.object_store import FOLDERS, VECTOR_FILES, as_os_errors, is_timeout, open_store
from service.store.image_store.parallel import Parallel

logger = logging.getLogger(__name__)

T = TypeVar("T")

MARKER = ".regraft-store"
PLACE = "REGRAFT_DATA and REGRAFT_BLOBS_URL must name the place of the database's other processes"
IMAGES = repeat("")
"""The `kinds` of contents that are all images."""
MAX_PARALLEL = 16
"""Concurrent requests to a store over the network, to hide its latency."""


class StoreUnreachable(RegraftError):
    """The image store is unreachable."""

    status = 503
    code = "store_unreachable"


class ImageUnreadable(RegraftError):
    """The store has the image but cannot read it."""

    status = 503
    code = "image_unreadable"


class Blobs:
    """The images and texts of all galleries, and other files in the same store."""

    def __init__(self, url: str, known_keys: Callable[[], Sequence[str]], marker: Callable[[], str]) -> None:
        """Open a store without a request to it.

        Args:
            url: of the store.
            known_keys: returns some keys that rows refer to, if any. A place without a marker becomes the store if it
                has one of these keys, or if there are none.
            marker: returns what the marker of the database's store holds. An empty marker becomes this one.
        """
        self._store, self._root = open_store(url)
        self._local = "file" in self._store.protocol
        self._known_keys = known_keys
        self._marker = marker
        self._outage: str | None = None
        self._write_problem: str | None = None
        self._refused_folder, self._refused_bytes = "", 0
        """The folder that `_write_problem` is about, and the size of the largest file refused since."""

    @property
    def problem(self) -> str | None:
        """Why the store did not answer the last request, or refused the last write; None: neither."""
        # A store may refuse writes and still answer reads.
        return self._outage or self._write_problem

    def check_again(self) -> None:
        """Clear `problem` if the store now answers and accepts a file where it last refused one, and as large."""
        with suppress(StoreUnreachable, OSError):
            self.check()
            if self._write_problem is not None:
                self._try_write(self._refused_folder, self._refused_bytes)
                self._write_problem, self._refused_bytes = None, 0

    def write(self, gallery_id: int, contents: Iterable[bytes], kinds: Iterable[str] = IMAGES) -> list[str]:
        """Store images (or texts, if the kind is `keys.TEXT`) durably, and return their keys, in order.

        Raises:
            StorageFull, StoreUnreachable: nothing is stored.
        """
        self.check()
        folder = Path(self._path(str(gallery_id)))
        keys: list[str] = []
        with self._writing(keys, str(gallery_id)):
            if self._local:
                folder.mkdir(exist_ok=True)
            with Parallel(1 if self._local else MAX_PARALLEL) as parallel:
                for content, kind in zip(contents, kinds, strict=False):
                    keys.append(f"{gallery_id}/{uuid.uuid4().hex}{kind}")
                    parallel.add(self._put, keys[-1], content)
            if self._local:
                sync_all([Path(self._path(key)) for key in keys])
                sync_all([folder, folder.parent])
        return keys

    def put(self, key: str, content: bytes) -> None:
        """Store a file durably under a new key. Raises StorageFull, StoreUnreachable."""
        self.check()
        path = Path(self._path(key))
        with self._writing([key], key.rpartition("/")[0]):
            if self._local:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._put(key, content)
            if self._local:
                above = path.parents[: key.count("/") + 1]
                sync_all([path, *above])

    @contextmanager
    def _writing(self, keys: Iterable[str], folder: str) -> Iterator[None]:
        """Context of writing keys of one folder, which are removed if anything fails."""
        try:
            yield
        except BaseException as error:
            self.remove(keys)
            if is_full(error):
                problem = f"the image store {self.public_url} is full: {error}"
                self._write_problem, self._refused_folder = problem, folder
                raise StorageFull(problem) from error
            if isinstance(error, OSError):
                problem = f"the image store {self.public_url} cannot be written: {error}"
                if not isinstance(error, FileNotFoundError):  # the gallery and its folder were deleted meanwhile
                    self._write_problem, self._refused_folder = problem, folder
                raise StoreUnreachable(problem) from error
            raise
        self._write_problem, self._refused_bytes = None, 0

    def read(self, key: str) -> bytes:
        """The content of a key.

        Raises:
            FileNotFoundError: the store answers, and does not have it.
            OSError: the store answers, but does not return it.
            StoreUnreachable: the store does not answer.
        """
        try:
            image = self._read(key)
        except OSError as error:
            self._check_after(error)
        else:
            self._outage = None
            return image
        # The store answers now, but may not have done so before.
        return self._read(key)

    def read_part(self, key: str, start: int, end: int) -> bytes | None:
        """The bytes [start, end) of a file, or up to its end; None: the file is missing.

        Raises:
            StoreUnreachable: the store does not answer, or does not return the file.
        """
        try:
            return self._read(key, start, end)
        except OSError as error:
            self._check_after(error)
        try:  # the store answers now, but may not have done so before
            return self._read(key, start, end)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreUnreachable(f"the image store {self.public_url} cannot read {key!r}: {error}") from error

    def fetch(self, key: str) -> bytes | None:
        """The content of a key, None if it is missing. Raises StoreUnreachable, ImageUnreadable."""
        try:
            return self.read(key)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ImageUnreadable(f"the image store {self.public_url} cannot read image {key!r}: {error}") from error

    def read_all(self, keys: Iterable[str]) -> Iterator[Callable[[], bytes]]:
        """For each key, in order, a function that returns and raises as `read`; see `_prefetched`."""
        return self._prefetched(self.read, keys)

    def fetch_all(self, keys: Iterable[str]) -> Iterator[bytes | None]:
        """`fetch` each key, in order; the first error ends the iteration."""
        with closing(self._prefetched(self.fetch, keys)) as results:
            yield from (result() for result in results)

    def _prefetched(self, read: Callable[[str], T], keys: Iterable[str]) -> Generator[Callable[[], T]]:
        """Read keys; over a network, the next ones are requested while one is used."""
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
        """Raise StoreUnreachable unless the store answers and is that of the database.

        Writes the marker if the place becomes the store.
        """
        try:
            try:
                found = self._read(MARKER)
            except FileNotFoundError:
                self._recognise()
                self._write_marker()
            else:
                self._compare(found)
        except OSError as error:
            raise self._outage_error(error) from error
        self._outage = None

    def _check_after(self, error: OSError) -> None:
        """Check the store after an error. Raises StoreUnreachable unless it answers."""
        if is_timeout(error):
            raise self._outage_error(error) from error
        self.check()

    def _outage_error(self, error: OSError) -> StoreUnreachable:
        before, self._outage = self._outage, f"the image store {self.public_url} is unreachable: {error}"
        if before is None:
            logger.error(Event("store_lost", reason=self._outage))
        return StoreUnreachable(self._outage)

    def _recognise(self) -> None:
        """Raise FileNotFoundError if a place without a marker is not the store."""
        known_keys = self._known_keys()
        if known_keys and not any(self._exists(key) for key in known_keys):
            raise FileNotFoundError(
                f"it has neither its marker nor any image; {PLACE} (if the images are lost, create an empty file "
                f"{MARKER} there)"
            )

    def _compare(self, found: bytes) -> None:
        """Write the marker if it is empty. Raises OSError if it is that of another database's store."""
        if found == self._marker().encode():
            return
        if found:
            raise OSError(
                f"it belongs to another database; {PLACE} (to give this database the store and all images in it, empty "
                f"the file {MARKER} there)"
            )
        self._write_marker()

    def _write_marker(self) -> None:
        content = self._marker().encode()
        with as_os_errors():
            self._store.makedirs(self._root, exist_ok=True)
            self._store.pipe_file(self._path(MARKER), content)
        if self._local:
            sync_all([Path(self._path(MARKER)), Path(self._root)])

    def _try_write(self, folder: str, size: int) -> None:
        """Write and remove a file of `size` bytes in a folder, else beside the marker. Raises OSError."""
        name = f"{MARKER}-{uuid.uuid4().hex}"
        keys = [f"{folder}/{name}", name]
        try:
            try:
                self._put(keys[0], bytes(size))
            except FileNotFoundError:  # the gallery was deleted, or its folder could not be made
                self._put(keys[1], bytes(size))
        finally:
            self.remove(keys)

    def _put(self, key: str, content: bytes) -> None:
        try:
            with as_os_errors():
                self._store.pipe_file(self._path(key), content)
        except OSError:
            self._refused_bytes = max(self._refused_bytes, len(content))
            raise

    def _read(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        with as_os_errors():
            return bytes(self._store.cat_file(self._path(key), start=start, end=end))

    def exists(self, key: str) -> bool:
        """Whether the store has this key. Raises StoreUnreachable."""
        try:
            return self._exists(key)
        except OSError as error:
            raise self._outage_error(error) from error

    def _exists(self, key: str) -> bool:
        with as_os_errors():
            return bool(self._store.exists(self._path(key)))

    def all(self) -> Iterator[tuple[str, float]]:
        """Every key of an image or text, with its age in seconds (0 if unknown); other files are left out.

        Raises:
            StoreUnreachable: the store does not answer; so do the other lists.
        """
        return ((key, age) for key, age in self._all("") if is_content(key))

    def all_vector_files(self) -> Iterator[tuple[str, float]]:
        """Every key of a file of vectors, with its age in seconds."""
        return ((key, age) for key, age in self._all(VECTOR_FILES) if is_vector_file(key))

    def all_folders(self) -> Iterator[tuple[str, float]]:
        """Every key of a folder of a version or edge, with its age in seconds, see `folders`."""
        return ((key, age) for key, age in self._all(FOLDERS) if is_folder(key))

    def _all(self, below: str) -> Iterator[tuple[str, float]]:
        place = self._path(below).rstrip("/")
        try:
            now = self._now()
            for path, written in self._local_files(place) if self._local else self._remote_files(place):
                when = now if written is None else written if isinstance(written, (int, float)) else written.timestamp()
                yield path.removeprefix(self._root).lstrip("/"), max(now - float(when), 0.0)
        except OSError as error:
            raise self._outage_error(error) from error

    def _now(self) -> float:
        """UTC seconds since the epoch by the clock that dates the store's files: machines may differ by minutes."""
        key = f"{MARKER}-{uuid.uuid4().hex}"
        try:
            self._put(key, b"")
        except OSError:  # nothing can be removed, either
            return time.time()
        try:
            with as_os_errors():
                return float(self._store.modified(self._path(key)).timestamp())
        finally:
            self.remove([key])

    def _local_files(self, folder: str) -> Iterator[tuple[str, Any]]:
        """Every file below a folder, and when it was written; lazily, as there may be many."""
        with suppress(FileNotFoundError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir():
                    yield from self._local_files(entry.path)
                else:
                    with suppress(FileNotFoundError):
                        yield entry.path, entry.stat().st_mtime

    def _remote_files(self, place: str) -> Iterator[tuple[str, Any]]:
        """Every file of a store over the network, and when it was written; one listing per gallery."""
        # No check by `exists` first: for a folder, its result depends on the folder's content.
        with suppress(FileNotFoundError), as_os_errors():
            for found in self._store.ls(place, detail=True):
                name, folder = found["name"], found["type"] == "directory"
                for path, details in (self._store.find(name, detail=True) if folder else {name: found}).items():
                    yield str(path), details.get("mtime") or details.get("LastModified")

    def remove(self, keys: Iterable[str]) -> list[str]:
        """Remove keys; one that cannot be removed is logged and left as an orphan. Returns those left."""
        left: list[str] = []
        with Parallel(1 if self._local else MAX_PARALLEL) as parallel:
            for key in keys:
                parallel.add(self._remove, key, left)
        return left

    def _remove(self, key: str, left: list[str]) -> None:
        try:
            self._store.rm_file(self._path(key))
        except FileNotFoundError:
            pass
        except Exception:
            logger.warning(Event("blob_orphaned", key=key), exc_info=True)
            left.append(key)

    def remove_gallery(self, gallery_id: int) -> None:
        """Remove every image and text of a gallery; errors are logged."""
        try:
            self.check()  # galleries of another database have the same numbers
            self._store.rm(self._path(str(gallery_id)), recursive=True)
        except FileNotFoundError:
            pass
        except Exception:
            logger.warning(Event("blobs_orphaned", gallery=gallery_id), exc_info=True)

    @property
    def public_url(self) -> str:
        """The store's URL for messages, without credentials."""
        protocol = self._store.protocol
        return f"{protocol if isinstance(protocol, str) else protocol[0]}://{self._root}"

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"
