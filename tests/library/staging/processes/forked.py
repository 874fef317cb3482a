"""Processes of Regraft, forked from one that has imported it: real ones, without the seconds of a start."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[4]
# Modules that start threads when imported (onnxruntime) are left to each process: a fork does not copy threads.
PRELOADED = ["regraft.cli", "service.http.app", "service.backfills.worker", "staging.processes.forked"]


class Forked:
    """`python COMMAND` in the repository, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, command: Sequence[object], env: Mapping[str, str], out: Path, err: Path | None = None) -> None:
        """Start it; its output goes to the files `out` and `err`, or all of it to `out`."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        out.touch()
        given = ([str(word) for word in command], dict(env), str(out), str(err or out))
        self._process = context.Process(target=_become, args=given)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OMP_NUM_THREADS", "1")  # for the libraries that it imports
            patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))
            # Else each process would first import the main module of this one.
            patch.setitem(sys.modules, "__main__", ModuleType("__main__"))
            forkserver.ensure_running()
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0)
        return code

    def send_signal(self, how: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, how)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def remove_folder() -> None:
    """Remove the folder of the socket: not every worker of pytest-xdist ends by the exit that does so."""
    # -100 is the priority of the folder; what ran here is not run again at the exit.
    util._run_finalizers(-100)  # type: ignore[attr-defined]


def run(command: Sequence[object], env: Mapping[str, str], folder: Path) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a process that ends by itself; `folder`: for its output."""
    out, err = folder / "out", folder / "err"
    for path in (out, err):
        path.write_text("")
    code = Forked(command, env, out, err).wait(90)
    return code, out.read_text(), err.read_text()


def environment(**variables: str) -> dict[str, str]:
    """The environment of this process without Regraft's variables, plus these."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("REGRAFT_")}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}


def _become(command: list[str], env: dict[str, str], out: str, err: str) -> None:
    os.environ.clear()
    os.environ.update(env)
    os.chdir(ROOT)
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), number)
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")
