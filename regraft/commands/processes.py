"""`regraft serve`, `worker` and `migrate`, which SIGINT and SIGTERM stop cleanly."""

from __future__ import annotations

import errno
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from index.errors import RegraftError
from index.garbage_collection import gc_paused
from regraft.commands.children import LISTENING, STOP_SECONDS, Servers, Workers, stop_with_parent, terminate_with_parent
from regraft.commands.settings import FOLLOW_PARENT, Data, apply_options, checked_settings, usable_database
from regraft.terminal.answers import answer, out
from regraft.terminal.extras import needs
from regraft.terminal.stopping import interrupt

if TYPE_CHECKING:
    from service.settings import Settings

NICENESS = 10
"""Niceness of a worker, which usually shares the machine with a service: queries have priority over a backfill."""
STUCK = 4
"""Exit code of a worker that did not end in `STOP_SECONDS`."""
BACKLOG = 2048

logger = logging.getLogger(__name__)


def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on.", show_default="127.0.0.1")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port to listen on.", show_default="8080")] = None,
    data: Data = None,
    workers: Annotated[int, typer.Option(min=0, help="Worker processes to start.")] = 1,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Server processes that share the port.", show_default="1")
    ] = None,
) -> None:
    """Run the service and its workers."""
    apply_options({"host": host, "port": port, "data": data, "processes": processes})
    with needs("serve"), gc_paused():
        from index.engines.memory.gpu import check_device
        from service.http.app import serve as run_service
        from service.http.server.auth import check_exposure
        from service.logs import configure
        from service.store.database.migration import upgrade
    settings = checked_settings()
    check_exposure(settings)
    settings.execution.check()
    check_device(settings.index_device)
    if (listening := os.environ.get(LISTENING)) is not None:
        threading.Thread(target=terminate_with_parent, daemon=True).start()
        run_service(settings, socket.socket(fileno=int(listening)))
        _exit_while_indexing()
        return
    _check_free(settings)
    _check_stores(settings)
    configure(settings.log_format, settings.log_level)
    # Before the workers start, so that they do not race for it, and for a readable error.
    with usable_database(settings):
        upgrade(settings)
    # uvicorn raises the signal that stopped it again at its end, which must not end this process before the workers.
    signal.signal(signal.SIGTERM, interrupt)
    with Workers(workers), suppress(KeyboardInterrupt):
        if settings.processes > 1:
            _serve_together(settings, workers)
            return
        run_service(settings, listening=partial(_announce, settings, workers))
    _exit_while_indexing()


def _exit_while_indexing() -> None:
    """Exit at once if the indexer is still inside FAISS: the interpreter's normal exit would abort that thread."""
    if any(thread.name == "indexer" for thread in threading.enumerate()):
        sys.stdout.flush()
        os._exit(0)


def _serve_together(settings: Settings, workers: int) -> None:
    """Run the service in several processes that accept from one socket, until this one is stopped."""
    with _listening(settings.host, settings.port) as listener:
        _announce(settings, workers, listener.getsockname()[1])
        with Servers(settings.processes, listener), suppress(KeyboardInterrupt):
            threading.Event().wait()


def _announce(settings: Settings, workers: int, port: int) -> None:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    url, processes = f"http://{host}:{port}", settings.processes
    answer({"url": url, "processes": processes, "workers": workers, "data": settings.data})
    together = f"{processes} processes, " if processes > 1 else ""
    out.print(f"Regraft: {url}, {together}{workers} worker(s), data in {settings.data}")


def _check_free(settings: Settings) -> None:
    """Check that the port is free before anything is created. Raises CannotListen."""
    # Without listening: clients that connect now must be refused, not disconnected later.
    _bound_socket(settings.host, settings.port).close()


def _check_stores(settings: Settings) -> None:
    """Raise a readable error if images, or vectors in files, cannot be stored."""
    from service.store.image_store.object_store import open_store
    from service.store.vectors.parquet import parquet

    open_store(settings.blobs_url)
    if settings.vectors == "objects":
        parquet()


def _listening(host: str, port: int) -> socket.socket:
    """A listening socket, which child processes can accept from. Raises CannotListen."""
    listener = _bound_socket(host, port)
    listener.listen(BACKLOG)
    return listener


def _bound_socket(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return _bind(family, address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise CannotListen(f"port {port} of {host} is in use; use another --port") from error
        raise CannotListen(f"cannot listen on {host}:{port}: {error.strerror}") from error


def _bind(family: socket.AddressFamily, address: tuple[Any, ...]) -> socket.socket:
    with ExitStack() as failed:
        made = failed.enter_context(socket.socket(family))
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
        failed.pop_all()
    return made


def worker(
    data: Data = None,
    url: Annotated[
        str | None, typer.Option(help="Connect to this service over HTTP instead of its database.", show_default=False)
    ] = None,
    key: Annotated[
        str | None, typer.Option(envvar="REGRAFT_WORKER_KEY", help="Worker key of the service.", show_default=False)
    ] = None,
) -> None:
    """Run a worker; a service can have any number."""
    with _stopped_by_signals() as stop:
        if url is not None:
            _work_remotely(url, key, data, stop)
            return
        apply_options({"data": data})
        with needs("serve"):
            from service.backfills.worker import run

        if os.environ.get(FOLLOW_PARENT):
            threading.Thread(target=stop_with_parent, args=(stop,), daemon=True).start()
        settings = checked_settings()
        settings.execution.check()
        _check_stores(settings)
        answer({"data": settings.data})
        with usable_database(settings):
            os.nice(NICENESS)
            run(settings, stop)


def _work_remotely(url: str, key: str | None, data: Path | None, stop: threading.Event) -> None:
    with needs("worker"):
        from regraft.client import Client
        from regraft.remote import RemoteWorker
        from service.logs import configure

    settings = checked_settings()
    settings.execution.check()
    configure(settings.log_format, settings.log_level)
    folder = (data or settings.data) / "worker"
    answer({"url": url, "data": folder})
    with Client(url, key) as client:
        RemoteWorker(
            client,
            folder,
            stop,
            execution=settings.execution,
            max_pixels=settings.max_image_pixels,
            limits=settings.verifying,
            apis=settings.apis,
        ).work()


def migrate(data: Data = None) -> None:
    """Migrate the database to this release's schema."""
    apply_options({"data": data})
    with needs("serve"):
        from service.logs import configure
        from service.store.database.connections import without_password
        from service.store.database.migration import upgrade
    settings = checked_settings()
    configure(settings.log_format, settings.log_level)
    with usable_database(settings):
        url = settings.database_url
        new = upgrade(settings)
    shown = without_password(url)
    answer({"database": shown, "up_to_date": True, "created": new})
    out.print(f"{shown} {'was empty or missing: created its tables' if new else 'is up to date'}")


class CannotListen(RegraftError):
    """The address is in use or not of this machine."""

    code = "cannot_listen"


@contextmanager
def _stopped_by_signals() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set; a while after it this process exits even if the block is still running.

    Python's own signal handlers run between its instructions, so not while the main thread is inside onnxruntime.
    """
    stop, ended = threading.Event(), threading.Event()
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)

    def listen() -> None:
        os.read(read_end, 1)
        stop.set()

    def end() -> None:
        stop.wait()
        if not ended.wait(STOP_SECONDS):
            os._exit(STUCK)

    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    wakeup = signal.set_wakeup_fd(write_end)
    threads = [threading.Thread(target=work, daemon=True) for work in (listen, end)]
    for thread in threads:
        thread.start()
    try:
        yield stop
    finally:
        ended.set()
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(write_end)  # ends `listen` and, by `stop`, the other thread
        for thread in threads:
            thread.join()
        os.close(read_end)
