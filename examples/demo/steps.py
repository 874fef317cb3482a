"""An upgrade step by step, in a small gallery: gate report, shadow, canary, current, and a remote worker's backfill.

The backfill is paused, resumed and rolled back half-way; after the version is deployed again, it is completed.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TypeVar

from examples.demo.measure import Answer, chunks_in_hand, same_answers
from examples.demo.upgrade import OLD, POLL_SECONDS, Stage, Way, fill, timed
from regraft import Problem
from regraft.client import Json
from regraft.models import BackfillInfo, GateReport, SearchResponse

WAY = Way("steps", "v2-oca", "truncate")
ITEMS = 150
K = 10
SHADOWED, CANARIED, WHILE_PAUSED, COMPARED = 40, 60, 20, 40
"""Number of queries in the shadow, in the canary, during the pause; and of those whose rankings are compared."""
SHADOW = {"share": 1.0}
CANARY = {"share": 0.5, "max_error_rate": 0.05, "max_p99_ms": 10_000, "min_queries": 10}
"""The limit of the latency is large, because it must hold on a busy machine."""
CHUNK_SIZE = 5
RATE = 25.0
"""Items per second until the rollback: so slow that it happens in the middle, even on a busy machine."""
PAUSE_AT = 1 / 3
CLOSE = 1e-6
WAIT_SECONDS = 60.0
IN_PLACE = "the gallery to hold what was moved"
UNAUTHORIZED = 401

Found = TypeVar("Found")


def step_by_step(stage: Stage, page: Path) -> Json:
    """Run all steps; returns the results and writes the gate's report as HTML to `page`."""
    seconds: dict[str, float] = {}
    stage.console.print(f"[bold]{WAY.name}[/]: {OLD} -> {WAY.version} by {WAY.edge}, one step after the other")
    small = replace(stage, pictures=replace(stage.pictures, items=stage.pictures.items[:ITEMS]))
    with timed(seconds, "ingest"):
        fill(small, WAY.name)
    before = small.ask(WAY.name, COMPARED)
    with timed(seconds, "gate"):
        gate = _gate(small, page)
    with timed(seconds, "shadow_and_canary"):
        trials = _try_out(small, gate.id)
    with timed(seconds, "backfill"):
        backfill = _move_remotely(small, gate.id, before)
    history = [{"version": one.version, "state": one.state} for one in stage.client.deployments(WAY.name)]
    told = {
        "version": WAY.version,
        "items": len(small.pictures.items),
        "gate": {**gate.model_dump(), "page": page.name},
    }
    return {**told, **trials, "backfill": backfill, "deployments": history, "seconds": seconds}


def expectations(steps: Json) -> Iterator[tuple[str, bool]]:
    """All expectations of these steps: the message if it is not met, and whether it is met."""
    version, shadow, canary, backfill = (steps[name] for name in ("version", "shadow", "canary", "backfill"))
    yield f"steps: answers came from {shadow['answered_by']} in the shadow", set(shadow["answered_by"]) == {OLD}
    counted = shadow["counted"]
    yield f"steps: the shadow compared {counted['compared']} of its queries", counted["compared"] == shadow["asked"]
    seen, shown = shadow["seen_when_current"], {name: counted[name] for name in shadow["seen_when_current"]}
    alike = all(abs(seen[name] - shown[name]) < CLOSE for name in seen)
    yield f"steps: the shadow foretold {shown}, then came {seen}", alike
    counted = canary["counted"]
    yield (
        f"steps: the canary counted {counted['queries']}, the client {canary['answered_by']}",
        canary["answered_by"] == {OLD: counted["queries"]["old"], version: counted["queries"]["new"]},
    )
    for phase in ("shadow", "canary"):
        yield (
            f"steps: errors in the {phase}: {steps[phase]['counted']['errors']}",
            not steps[phase]["counted"]["errors"],
        )
    yield "steps: the worker key opens more than the work", backfill["worker_key_refused_elsewhere"]
    yield f"steps: workers were {backfill['workers']}", backfill["workers"] == ["remote"]
    pause, back = backfill["pause"], backfill["rollback"]
    yield f"steps: items moved during the pause: {pause}", pause["at_start"] == pause["at_end"]
    yield "steps: a worker got work during the pause", not pause["work_given"]
    yield "steps: after the resumption nothing moved", back["done"] > pause["at_end"]["done"]
    middle = back["state"] == "cancelled" and 0 < back["done"] < back["total"]
    yield f"steps: rolled back at {back['done']} of {back['total']}, not in the middle", middle
    yield "steps: after the rollback rankings differ from those before the deployment", back["rankings_equal"]
    forward = backfill["forward"]
    yield "steps: moved items did not come back with the version", forward["items_forward"] == back["done"]
    yield f"steps: at the end the mix is {forward['mix']}", forward["mix"] == {version: steps["items"]}
    remotely, done = backfill["moved_remotely"], back["done"] + forward["done"]
    yield f"steps: the remote worker moved {remotely} of {done} items", remotely == done


def _gate(stage: Stage, page: Path) -> GateReport:
    gate = stage.client.gate(WAY.name, WAY.version, "digit", sample=len(stage.pictures.items))
    assert gate.id is not None  # only a dry run has none
    page.write_text(stage.client.gate_page(WAY.name, gate.id), encoding="utf-8")
    low, value, high = (100 * getattr(gate.difference, name) for name in ("low", "value", "high"))
    stage.console.print(
        f"  gate: {gate.verdict}, new/old - old/old {value:+.1f} [{low:.1f}, {high:.1f}] points: {page}",
        markup=False,
    )
    return gate


def _try_out(stage: Stage, gate: int | None) -> Json:
    """Deploy as shadow, then as canary for a share of the queries, then for all."""
    client, queries = stage.client, stage.pictures.queries
    old = _ask_each(stage, queries[:SHADOWED])
    deployed = client.deploy(WAY.name, WAY.version, gate=gate, until="shadow", shadow=SHADOW)
    assert deployed.id is not None
    shadow = _trial(stage, deployed.id, "shadow", queries[:SHADOWED], _compared)
    client.advance(WAY.name, deployed.id, "canary", canary=CANARY)
    canary = _trial(stage, deployed.id, "canary", queries[:CANARIED], _answered)
    client.advance(WAY.name, deployed.id, "current")
    shadow["seen_when_current"] = agreement(old, _ask_each(stage, queries[:SHADOWED]))
    counted, times = shadow["counted"], shadow["counted"]["latency_ms"]
    stage.console.print(
        f"  shadow: {counted['compared']} queries answered by {OLD}, and by {WAY.version} behind the response: "
        f"overlap@{K} {counted['overlap']:.2f}, rank correlation {counted['rank_correlation']:.2f}, "
        f"first matches that differ {counted['first_match_flips']}, "
        f"p50 {times['old']['p50']:.1f} -> {times['new']['p50']:.1f} ms"
    )
    answered = " and ".join(f"{count} by {version}" for version, count in sorted(canary["answered_by"].items()))
    p99 = canary["counted"]["latency_ms"]["new"]["p99"]
    stage.console.print(
        f"  canary: {answered}, {canary['counted']['errors']} errors, p99 {p99:.1f} ms: within its limits, now current"
    )
    return {"shadow": shadow, "canary": canary}


def _trial(stage: Stage, deployment: int, phase: str, queries: Sequence[bytes], seen: Callable[[Json], int]) -> Json:
    """Send the queries one by one and wait until the service has counted all."""
    answered = Counter(answer.version for answer in _ask_each(stage, queries))

    def counts() -> Json | None:
        found = stage.client.deployment(WAY.name, deployment).trial.get(phase, {})
        return found if found and seen(found) >= len(queries) else None

    counted = _wait(stage, f"the counts of the {phase}", counts)
    settings = SHADOW if phase == "shadow" else CANARY
    return {"asked": len(queries), "answered_by": dict(answered), "settings": settings, "counted": counted}


def _ask_each(stage: Stage, queries: Sequence[bytes]) -> list[SearchResponse]:
    return [stage.client.query(WAY.name, [query], K) for query in queries]


def agreement(old: Sequence[SearchResponse], new: Sequence[SearchResponse]) -> Json:
    """The numbers of a shadow, computed by a client from both answers to each query."""
    pairs = [(_ids(a), _ids(b)) for a, b in zip(old, new, strict=True)]
    common = [len(set(a) & set(b)) / len(a) for a, b in pairs]
    flips = sum(a[0] != b[0] for a, b in pairs)
    return {
        "overlap": fmean(common),
        "rank_correlation": fmean(tau(*pair) for pair in pairs),
        "first_match_flips": flips,
    }


def tau(old: Sequence[str], new: Sequence[str]) -> float:
    """Kendall's tau over all pairs of ids in either list; ids that a list lacks are tied at its end."""

    def order(ids: Sequence[str], a: str, b: str) -> int:
        place, other = (ids.index(one) if one in ids else len(ids) for one in (a, b))
        return (place > other) - (place < other)

    return fmean(order(old, *pair) * order(new, *pair) for pair in itertools.combinations({*old, *new}, 2))


def _ids(answer: SearchResponse) -> list[str]:
    return [match.id for match in answer.results[0].matches]


def _compared(counted: Json) -> int:
    return int(counted["compared"] + counted["errors"] + counted["dropped"])


def _answered(counted: Json) -> int:
    return int(counted["queries"]["old"] + counted["queries"]["new"])


def _move_remotely(stage: Stage, gate: int | None, before: Answer) -> Json:
    """Start, pause, resume, roll back, deploy again and finish a backfill by a worker without the database."""
    client, processes = stage.client, stage.processes
    processes.start_remote()
    workers = [name for name in processes.running() if name != "service"]
    started = client.start_backfill(WAY.name, chunk_size=CHUNK_SIZE, rate=RATE)
    _wait_moved(stage, started, round(PAUSE_AT * len(stage.pictures.items)))
    client.pause_backfill(started.id)
    pause = _look_twice(stage, started)
    client.resume_backfill(started.id)
    _wait_moved(stage, started, pause["at_end"]["done"] + CHUNK_SIZE)
    back = _roll_back(stage, started, before)
    forward = _forward(stage, gate)
    processes.end("remote")
    stage.console.print(
        f"  a remote worker, and no other: paused at {pause['at_start']['done']} of {back['total']} items, "
        f"{pause['at_end']['done']} after {pause['queries']} queries; resumed; rolled back at {back['done']}, rankings "
        f"{'as before the deployment' if back['rankings_equal'] else 'DIFFERENT'}; forward again, finished"
    )
    return {
        "workers": workers,
        "worker_key_refused_elsewhere": _refused_elsewhere(stage),
        "moved_remotely": processes.remotely_moved(),
        "pause": pause,
        "rollback": back,
        "forward": forward,
    }


def _look_twice(stage: Stage, backfill: BackfillInfo) -> Json:
    """The progress of a paused backfill, once settled and again after queries and a refused claim of work.

    Settled: no chunk is held by a worker, and the replica has followed all moves.
    """
    data = stage.processes.data
    _wait(stage, "the chunks in hand", lambda: chunks_in_hand(data, backfill.id) == 0 or None)
    start = _wait(stage, IN_PLACE, lambda: _settled(stage, backfill))
    queries = stage.pictures.queries[:WHILE_PAUSED]
    for query in queries:
        stage.client.query(WAY.name, [query], K)
    given = stage.client.claim_work("demo")
    return {"at_start": start, "at_end": _standing(stage, backfill), "queries": len(queries), "work_given": bool(given)}


def _standing(stage: Stage, backfill: BackfillInfo) -> Json:
    return {"done": stage.client.backfill(backfill.id).done, "mix": stage.client.gallery(WAY.name).mix}


def _settled(stage: Stage, backfill: BackfillInfo, moved_before: int = 0) -> Json | None:
    standing = _standing(stage, backfill)
    return standing if standing["mix"].get(WAY.version, 0) == moved_before + standing["done"] else None


def _roll_back(stage: Stage, backfill: BackfillInfo, before: Answer) -> Json:
    """Roll back to the old version while items of both versions are stored."""
    stage.client.rollback(WAY.name, "demo")
    after = stage.ask(WAY.name, COMPARED)
    ended = stage.client.backfill(backfill.id)
    equal = same_answers(after, before)
    counted = {"state": ended.state, "done": ended.done, "total": ended.total}
    return {**counted, "rankings_equal": equal, "whole_rankings_compared": len(after.ids)}


def _forward(stage: Stage, gate: int | None) -> Json:
    """Deploy again, with the moved items active at once, and move the others at full speed."""
    client = stage.client
    deployed = client.deploy(WAY.name, WAY.version, gate=gate)
    started = client.start_backfill(WAY.name, chunk_size=CHUNK_SIZE)
    _wait(stage, "the backfill", lambda: client.backfill(started.id).state != "running" or None)
    standing = _wait(stage, IN_PLACE, lambda: _settled(stage, started, deployed.activated))
    return {"items_forward": deployed.activated, **standing}


def _refused_elsewhere(stage: Stage) -> bool:
    """Whether the worker key is refused by all routes except those of work."""
    with stage.processes.client(stage.processes.worker_key) as worker:
        try:
            worker.galleries()
        except Problem as problem:
            return problem.status == UNAUTHORIZED
    return False


def _wait_moved(stage: Stage, backfill: BackfillInfo, done: int) -> None:
    _wait(stage, "moved items", lambda: stage.client.backfill(backfill.id).done >= done or None)


def _wait(stage: Stage, what: str, look: Callable[[], Found | None]) -> Found:
    """Call `look` until it finds something, and return that. Raises RuntimeError after a time limit."""
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        stage.processes.check()
        found = look()
        if found is not None:
            return found
        if time.monotonic() > deadline:
            raise RuntimeError(f"the demo waited for {what} for {WAIT_SECONDS:.0f} s")
        time.sleep(POLL_SECONDS)
