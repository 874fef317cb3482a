"""Two API processes on one PostgreSQL behind a proxy: queries that fail while one is killed or stopped.

    python benchmarks/replicas.py --items 10000 --clients 8 --writes 300

A gallery of ITEMS embeddings of 128 numbers, and CLIENTS that query all the time. Then the delay of replication: one
item is written to A, and B is queried for it as soon as A has answered; for comparison, B's time if nothing was
written. For an engine, a gallery of pgvector: the time from A's answer until the engine has that write; queries find it
earlier. Both processes that are replaced are the same release; tests/databases/test_rolling_upgrade.py tests a schema
that is newer than the program. The PostgreSQL and the proxy are those of the tests, on the same machine: compare counts
and ratios.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from command_line import Count, run_main
from sqlalchemy import create_engine, text

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "library"))

from clustered_gallery import clustered, fill

from service.settings import Settings
from staging.external.postgres import Server
from staging.processes.proxy import Proxy, proxied
from staging.processes.site import Site

BEFORE_SECONDS, AFTER_SECONDS = 2.0, 2.0


def main(items: Count = 10_000, clients: Count = 8, writes: Count = 300) -> None:
    vectors, queries = clustered(items)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(closing(Server()))
        settings = Settings(data=scratch / "data", database_url=server.create(), preload="*")
        settings.data.mkdir()
        sites = [stack.enter_context(closing(Site(settings.data, settings))) for _ in range(2)]
        proxy = stack.enter_context(proxied([site.port for site in sites]))
        running = [site.server() for site in sites]
        fill(proxy.url, scratch, vectors, "auto")
        print(f"{items} items, {clients} clients; load {os.getloadavg()[0]:.1f}")
        print("| what happens | asked | failed | of them in flight at the kill | p50 ms | p99 ms | longest ms |")
        print(f"|{' --- |' * 7}")

        def kill() -> None:
            running[0].kill()
            running[0].wait()
            running[0] = sites[0].server()

        def replace(number: int) -> None:
            running[number].send_signal(signal.SIGTERM)
            assert running[number].wait(60) == 0
            running[number] = sites[number].server()

        def replace_both() -> None:
            replace(0)
            replace(1)

        happening: dict[str, Callable[[], None]] = {
            "nothing": lambda: time.sleep(2.0),
            "one is killed (-9) and started again": kill,
            "one ends (SIGTERM) and is started again": lambda: replace(0),
            "both are replaced, one after the other": replace_both,
        }
        for name, happens in happening.items():
            lost = len(proxy.lost)
            with asking(proxy, queries, clients) as (took, failed):
                time.sleep(BEFORE_SECONDS)
                happens()
                time.sleep(AFTER_SECONDS)
            p50, p99 = np.percentile(took, [50, 99]) * 1000
            in_flight = len(proxy.lost) - lost
            counts = f"{len(took) + len(failed)} | {len(failed)} | {in_flight}"
            print(f"| {name} | {counts} | {p50:.1f} | {p99:.1f} | {1000 * max(took):.0f} |")
        delays(sites, queries, writes)
        engine_delays(sites[0], queries, min(writes, 100))


@contextmanager
def asking(proxy: Proxy, queries: Any, clients: int) -> Iterator[tuple[list[float], list[str]]]:
    """Clients that ask until the end; gives what each answer took, and what failed."""
    took: list[float] = []
    failed: list[str] = []
    over = threading.Event()

    def ask(number: int) -> None:
        with httpx.Client(base_url=f"{proxy.url}/v1", timeout=60, trust_env=False) as http:
            while not over.is_set():
                number += clients
                body = {"version": "plain", "embeddings": [queries[number % len(queries)].tolist()], "k": 10}
                began = time.perf_counter()
                try:
                    answer = http.post("/galleries/asked/query", json=body)
                except httpx.TransportError as error:
                    failed.append(repr(error))
                    continue
                if answer.status_code == 200 and len(answer.json()["results"][0]["matches"]) == 10:
                    took.append(time.perf_counter() - began)
                else:
                    failed.append(answer.text)

    threads = [threading.Thread(target=ask, args=(n,), daemon=True) for n in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield took, failed
    finally:
        over.set()
        for thread in threads:
            thread.join()


def delays(sites: list[Site], queries: Any, writes: int) -> None:
    """What B takes to show what A has just acknowledged, and what it takes where there is nothing new."""
    a, b = (site.http for site in sites)
    seen: list[float] = []
    idle: list[float] = []
    missed = 0
    for n in range(writes):
        vector = queries[n % len(queries)] + 0.001 * (n + 1)
        item = {"id": f"new{n}", "embedding": vector.tolist()}
        body = {"version": "plain", "embeddings": [vector.tolist()], "k": 1}
        a.post("/galleries/asked/items", json={"items": [item]}).raise_for_status()
        for times in (seen, idle):
            began = time.perf_counter()
            found = b.post("/galleries/asked/query", json=body).json()["results"][0]["matches"][0]["id"]
            times.append(time.perf_counter() - began)
            missed += found != f"new{n}"
    new, old = (np.percentile(times, [50, 99]) * 1000 for times in (seen, idle))
    print(f"written at A, asked at B at the moment of A's answer, {writes} times: {missed} answers without it")
    print(f"that answer: p50 {new[0]:.1f}, p99 {new[1]:.1f} ms")
    print(f"the next, with nothing new: p50 {old[0]:.1f}, p99 {old[1]:.1f} ms")


def engine_delays(site: Site, queries: Any, writes: int) -> None:
    """What the engine takes until it covers what A has just acknowledged."""
    http, took = site.http, []
    http.post("/galleries", json={"name": "there", "index": {"kind": "pgvector"}}).raise_for_status()
    http.post("/galleries/there/deployments", json={"version": "plain"}).raise_for_status()
    with closing(create_engine(site.settings.database_url, isolation_level="AUTOCOMMIT").connect()) as connection:

        def covered() -> int:
            if connection.execute(text("select to_regclass('regraft_vectors.collection')")).scalar() is None:
                return 0
            return int(connection.execute(text("select max(covers) from regraft_vectors.collection")).scalar() or 0)

        for n in range(writes + 1):
            item = {"id": f"there{n}", "embedding": queries[n % len(queries)].tolist()}
            http.post("/galleries/there/items", json={"items": [item]}).raise_for_status()
            written = int(
                connection.execute(
                    text("select max(seq) from item join gallery on gallery.id = gallery_id where name = 'there'")
                ).scalar_one()
            )
            began = time.perf_counter()
            while covered() < written:
                time.sleep(0.002)
            took.append(time.perf_counter() - began)
    p50, p99 = np.percentile(took[1:], [50, 99]) * 1000  # the first one makes the table
    print(f"written at A, covered by pgvector, {writes} times: p50 {p50:.0f}, p99 {p99:.0f} ms")


if __name__ == "__main__":
    run_main(main)
