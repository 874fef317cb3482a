"""`CrashPoints`: list the points at which code changes files or the database, and end the process at one of them.

Files are watched at the calls that open, rename, remove or synchronise them, whichever code makes these calls. After
its end a process changes nothing any more: no clean-up runs, and no transaction is committed.
"""

from __future__ import annotations

import builtins
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from index import contents
from index.engines.memory import approximate, snapshot


class Killed(BaseException):
    """The process ends at this point."""


class CrashPoints:
    """Watches changes below a folder and ends the process at the point with this number, from 0.

    `torn`: in the middle of the file that is written there; else before the change.
    """

    def __init__(self, root: Path, number: int | None = None, *, torn: bool = False) -> None:
        self._root, self._number, self._torn = str(root), number, torn
        self._written: str | None = None
        self.seen: list[str] = []

    @contextmanager
    def watched(self, *more: tuple[Any, str]) -> Iterator[list[str]]:
        """Record the names of the changes in the body; `more`: owners and names of functions that are points too."""
        with pytest.MonkeyPatch.context() as patch:
            for owner in (builtins, io):
                patch.setattr(owner, "open", self._opening(io.open))
            for name in ("mkdir", "rename", "unlink", "rmdir"):
                patch.setattr(os, name, self._doing(name, getattr(os, name)))
            for module in (contents, snapshot):
                patch.setattr(module, "sync_all", self._doing("sync", module.sync_all))
            patch.setattr(approximate.Approximate, "write", self._writing(approximate.Approximate.write))
            for owner, name in more:
                patch.setattr(owner, name, self._doing(name, getattr(owner, name), anywhere=True))
            yield self.seen

    def _point(self, name: str, written: str | None = None) -> None:
        if self._written is not None:
            os.truncate(self._written, Path(self._written).stat().st_size // 2)
            self._number, self._written = -1, None  # no further point
        if self._number == -1:
            raise Killed
        self.seen.append(name)
        if len(self.seen) - 1 == self._number:
            if not self._torn or written is None:
                self._number = -1
                raise Killed
            self._written = written

    def _opening(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Any, mode: str = "r", *given: Any, **more: Any) -> Any:
            if not isinstance(file, int) and set(mode) & set("wxa+") and self._is_mine(file):
                self._point(f"write {Path(file).name}", os.fspath(file))
            return real(file, mode, *given, **more)

        return opened

    def _writing(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def written(index: Any, path: Path) -> None:
            self._point(f"write {path.name}", str(path))
            real(index, path)

        return written

    def _doing(self, name: str, real: Callable[..., Any], *, anywhere: bool = False) -> Callable[..., Any]:
        def done(*given: Any, **more: Any) -> Any:
            of = given[0][0] if name == "sync" else given[0]
            if anywhere or "dir_fd" in more or self._is_mine(of):
                self._point(name)
            return real(*given, **more)

        return done

    def _is_mine(self, path: Any) -> bool:
        return os.fspath(path).startswith(self._root) if isinstance(path, (str, os.PathLike)) else False
