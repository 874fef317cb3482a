"""One training at a time writes a version folder; others are refused, or wait for their turn.

Whoever trains into OUT holds a lock on OUT.lock (flock), which the system takes back when the process ends, however it
ends. Of the processes that `torchrun` started the first one holds it for all.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from index.errors import InvalidArgument
from index.new_folder import Unwritable, clear_leftovers
from training import processes

_held: dict[Path, int] = {}
"""The locks of this process, for which it would wait itself, and the file descriptors that hold them."""


class Taken(InvalidArgument):
    """Somebody trains into this folder already."""

    def __init__(self, out: Path) -> None:
        super().__init__(
            f"somebody trains into {out} now; wait until that ends, or choose another folder by --out", pointer="/out"
        )


@contextmanager
def only_here(out: Path) -> Iterator[None]:
    """Let nobody else train into a folder meanwhile.

    Raises:
        Taken: somebody does.
        Unwritable: nothing can be written beside the folder.
    """
    if not processes.leads():
        yield
        return
    missing = [folder for folder in out.parents if not folder.exists()]
    try:
        file = _locked(out)
    except OSError as error:
        raise Unwritable(f"{out} cannot be written: {error.strerror or error}") from error
    _held[lock_of(out).resolve()] = file
    try:
        clear_leftovers(out)
        yield
    finally:
        _held.pop(lock_of(out).resolve(), None)
        lock_of(out).unlink(missing_ok=True)
        os.close(file)
        with suppress(OSError):  # what was written is there
            for folder in missing:
                folder.rmdir()


def wait_for_turn(out: Path, say: Callable[[str], None]) -> None:
    """Return once nobody trains into a folder; says so where that takes time.

    Raises:
        Taken: this process itself does.
    """
    if lock_of(out).resolve() in _held:
        raise Taken(out)
    with suppress(FileNotFoundError), lock_of(out).open("rb") as file, suppress(OSError):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process, which trains {out}")
            fcntl.flock(file, fcntl.LOCK_EX)


def lock_of(out: Path) -> Path:
    """The file that is locked; empty, and gone with the training."""
    return out.with_name(f"{out.name}.lock")


def _let_go() -> None:
    """Close what a forked process holds with its parent."""
    for file in _held.values():
        os.close(file)
    _held.clear()


# Workers that make batches live on for seconds after a training that was killed.
os.register_at_fork(after_in_child=_let_go)


def _locked(out: Path) -> int:
    """A file descriptor that holds the lock."""
    while True:
        # Whoever trained before removes file and empty folders at the end: then begin anew.
        with suppress(FileNotFoundError):
            out.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(lock_of(out), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
                raise Taken(out) from None
            except OSError:  # a file system without locks: everyone trains
                return file
            if os.fstat(file).st_nlink:
                return file
            os.close(file)
