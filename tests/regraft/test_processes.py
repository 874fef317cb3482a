"""`serve`, `worker` and `migrate`: what they say before they start, and how they end."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing

import pytest

from regraft.client import Client
from regraft.commands import processes
from service.backfills import worker
from service.settings import Settings
from staging.processes.forked import Forked, environment
from staging.waiting import until

INDEXING = """
import sys, time
import faiss, numpy
from service.replica import indexer

class Slow:  # so that the interpreter takes a while to end
    def __del__(self, sleep=time.sleep):
        sleep(1)

def never_ends(self):
    rows = numpy.random.default_rng(0).random((5_000, 16), "float32")
    index = faiss.index_factory(16, "IVF30,Flat")
    index.train(rows)
    index.add(rows)
    print("indexing", flush=True)
    while True:
        index.search(rows, 10)

sys.slow = Slow()
indexer.Indexer._run, indexer.STOP_SECONDS = never_ends, 0.1
sys.argv[1:] = ["serve", "--workers", "0", "--port", "0"]
from regraft.cli import main
main()
"""


def test_a_service_that_is_stopped_while_it_measures_an_index_in_faiss_ends_with_code_0(tmp_path):
    env = environment() | {"REGRAFT_DATA": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", INDEXING], env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told = "".join(process.stdout.readline() for _ in range(2))
        process.terminate()
        try:
            assert (process.wait(30), "indexing" in told) == (0, True)
        finally:
            process.kill()


def test_a_worker_that_ended_leaves_no_hand_on_the_signals(run, monkeypatch, tmp_path):
    monkeypatch.setattr(processes, "STOP_SECONDS", 0.01)  # this process would end that soon
    monkeypatch.setenv("REGRAFT_DATABASE_URL", "nonsense")
    heard = []
    before = signal.signal(signal.SIGINT, lambda *_: heard.append("SIGINT"))

    try:
        assert run("worker", "--data", tmp_path)[0] == 1
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.1)
    finally:
        signal.signal(signal.SIGINT, before)

    assert heard == ["SIGINT"]


def test_a_worker_gives_way_to_whoever_asks_the_service_beside_it_before_it_works(run, monkeypatch, tmp_path):
    done = []  # in which order and thread: niceness is a thread's, and of those that it starts then
    monkeypatch.setattr(os, "nice", lambda by: done.append((by, threading.get_ident())))
    monkeypatch.setattr(worker, "run", lambda *_: done.append(("works", threading.get_ident())))

    assert run("worker", "--data", tmp_path)[0] == 0

    assert done == [(processes.NICENESS, threading.get_ident()), ("works", threading.get_ident())]


@pytest.mark.parametrize("command", [("migrate",), ("serve", "--workers", "0", "--port", "0")], ids=" ".join)
def test_what_is_said_of_the_database_before_anything_serves_has_the_form_of_the_log(
    run, monkeypatch, tmp_path, command
):
    monkeypatch.setattr("service.http.app.serve", lambda *_, **__: None)
    monkeypatch.setattr("regraft.commands.processes.signal.signal", lambda *_: None)
    monkeypatch.setenv("REGRAFT_LOG_FORMAT", "json")
    code, _, said = run("migrate", "--data", tmp_path)
    assert (code, [json.loads(line)["event"] for line in said.splitlines()]) == (0, ["database_created"])
    with closing(sqlite3.connect(tmp_path / "regraft.db", isolation_level=None)) as connection:
        connection.execute("update alembic_version set version_num = '9999'")

    code, _, said = run(*command, "--data", tmp_path)

    assert (code, [json.loads(line)["event"] for line in said.splitlines()]) == (0, ["schema_is_newer"])


def test_the_address_of_a_service_is_one_that_clients_take(capsys):
    processes._announce(Settings(host="::1"), 1, 8080)

    with Client(capsys.readouterr().out.split()[1].rstrip(",")) as client:
        assert client.url == "http://[::1]:8080"


@pytest.mark.parametrize("options", [(), ("--processes", "2")], ids=["one process", "two"])
def test_of_port_0_the_real_one_is_told(options, tmp_path):
    (told := tmp_path / "told").touch()
    command = ["-m", "regraft", "serve", "--json", "--port", "0", "--workers", "0", "--data", tmp_path / "d", *options]
    process = Forked(command, environment(), told, tmp_path / "log")
    try:
        until(lambda: told.read_text().endswith("\n"), process, said=(tmp_path / "log").read_text)
        with Client(json.loads(told.read_text())["url"]) as client:
            assert client.ready().status == "ready"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


@pytest.mark.parametrize("options", [(), ("--processes", "2")], ids=["one process", "two"])
def test_a_port_in_use_is_told_before_anything_is_made(run, options, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, shown, said = run("serve", "--port", port, "--data", tmp_path / "d", *options)

    assert (code, shown) == (1, "")
    assert said == f"regraft: port {port} of 127.0.0.1 is in use; use another --port\n"
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("command", ["serve", "worker", "migrate", "doctor"])
def test_a_data_folder_that_is_a_file_is_told(run, command, tmp_path):
    (tmp_path / "d").touch()

    code, _, said = run(command, "--data", tmp_path / "d")

    assert (code, said.endswith("d is a file, not a folder\n")) == (1, True)


STUCK_CALL = """
import ctypes
mutex = (ctypes.c_byte * 64)()
def stuck(*_, **__):  # in C, without end and deaf to signals, as a run of onnxruntime can be
    lock = ctypes.CDLL(None).pthread_mutex_lock
    print("stuck", flush=True)
    lock(mutex), lock(mutex)
"""
STUCK_WORKER = """
from regraft.commands import processes
import service.backfills.worker
processes.STOP_SECONDS = 0.2
service.backfills.worker.run = stuck
processes.worker()
"""
STUCK_SERVICE = """
from service.http import app
from service.http.server import draining
from service.settings import Settings
from service.store.database.migration import migrating, schema_revision
from service.store.database.migration import upgrade
draining.STUCK_SECONDS = 1
started = draining.Server.startup
async def startup(self, sockets=None):
    await started(self, sockets)
    runtime = self._app.state.runtime
    runtime.blocking_threads.submit(stuck)
draining.Server.startup = startup
upgrade(Settings())
app.serve(Settings(port=0))
"""


@pytest.mark.parametrize("code", [STUCK_WORKER, STUCK_SERVICE], ids=["worker", "service"])
def test_sigterm_ends_it_also_while_a_model_never_ends(code, tmp_path):
    env = {**os.environ, "REGRAFT_DATA": str(tmp_path)}
    command = [sys.executable, "-c", STUCK_CALL + code]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout.readline() == "stuck\n"
        time.sleep(0.2)
        process.terminate()
        assert process.wait(20) == processes.STUCK
    finally:
        process.kill()
        process.communicate()
