"""The upgrade demo over HTTP, with a real service and a real worker: `python -m examples.demo`.

    old/old   a gallery of handwritten digits, stored and searched through v1, which knows five digits
    new/old   v2 is deployed: at once every query goes through v2, the items are still v1's
    new/new   a worker has moved every item to v2, while one client kept querying and another kept writing

It runs for three compatible methods, each in a separate gallery. In the first, service and worker are killed with kill
-9 half-way. Each ends with a rollback to v1 in one call and a second deployment. A last upgrade goes step by step: gate
report, shadow, canary, and a backfill by a remote worker, which is paused, resumed and rolled back half-way.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from examples.demo import picture
from examples.demo import report as reporting
from examples.demo.engines import ENGINES, engine
from examples.demo.measure import same_answers, same_state, stored_state
from examples.demo.pictures import load_pictures
from examples.demo.processes import Processes
from examples.demo.steps import step_by_step
from examples.demo.upgrade import COMPARED, OLD, Stage, Upgrade, Way, undisturbed, upgrade
from index.errors import RegraftError

EXAMPLES = Path(__file__).parent.parent
WAYS = (
    Way("bct", "v2-bct", "identity"),
    Way("oca", "v2-oca", "truncate"),
    Way("fct", "v2-fct", "forward"),
)
TWIN = "bct-undisturbed"
GATE_PAGE = "demo-gate.html"


def main() -> int:
    """Run the demo and write its results; returns 0 if all expectations were met."""
    options = _options()
    console = Console(highlight=False)
    begun = time.perf_counter()
    pictures = load_pictures(items=options.items, queries=options.queries)
    try:
        with (
            _folder(options.keep) as folder,
            engine(options.engine, folder) as settings,
            Processes(folder, settings) as processes,
            processes.client() as client,
        ):
            index = {} if options.engine is None else {"kind": options.engine}
            stage = Stage(processes, client, pictures, options.examples, console, index)
            console.print(f"service at {processes.url} and worker are up, data in {folder}")
            report = _tell(stage, begun, options.report.with_name(GATE_PAGE))
    except (RegraftError, RuntimeError, OSError) as error:
        console.print(f"the demo stopped: {error}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("stopped; every process is ended")
        return 130
    options.report.write_text(json.dumps(report, indent=2) + "\n")
    picture.draw(report, pictures, options.curves)
    console.print(reporting.table(report))
    console.print(reporting.summary(report), markup=False)
    console.print(f"measurements: {options.report}, after {report['timings']['total']:.0f} s", markup=False)
    broken = reporting.unmet(report)
    for sentence in broken:
        console.print(f"NOT AS EXPECTED: {sentence}", style="red", markup=False)
    console.print(f"the story as a picture: {options.curves.resolve()}", markup=False, soft_wrap=True)
    return 1 if broken else 0


def _tell(stage: Stage, begun: float, page: Path) -> dict[str, Any]:
    timings = {"start": time.perf_counter() - begun}
    versions = [stage.client.register_version(stage.examples / name) for name in (OLD, *(w.version for w in WAYS))]
    upgrades = [_upgrade(stage, way, kill=way is WAYS[0]) for way in WAYS]
    undisturbed(stage, WAYS[0], TWIN)
    kill = {**(upgrades[0].kill or {}), **_compare_with_twin(stage)}
    steps = step_by_step(stage, page)
    timings["total"] = time.perf_counter() - begun
    shown = picture.examples(upgrades[0].found, stage.pictures)
    return {
        **reporting.build(upgrades, kill, [version.model_dump() for version in versions], timings, steps),
        "examples": shown,
    }


def _upgrade(stage: Stage, way: Way, *, kill: bool) -> Upgrade:
    stage.console.print(f"[bold]{way.name}[/]: {OLD} -> {way.version} by {way.edge}")
    done = upgrade(stage, way, kill=kill)
    scores = " -> ".join(f"{100 * m.cmc(1):.1f}" for m in (done.old_old, done.new_old, done.new_new))
    stage.console.print(f"  CMC-1 {scores} % (old/old -> new/old -> new/new), gate: {done.gate['verdict']}")
    return done


def _compare_with_twin(stage: Stage) -> dict[str, bool]:
    """Whether the final state of the gallery whose processes were killed equals that of an undisturbed one."""
    data, killed = stage.processes.data, WAYS[0].name
    return {
        "state_equal": same_state(stored_state(data, killed), stored_state(data, TWIN)),
        "answers_equal": same_answers(stage.ask(killed, COMPARED), stage.ask(TWIN, COMPARED)),
    }


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix="regraft-demo-") as scratch:
        yield Path(scratch)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description="A live upgrade, end to end.")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="keep data and logs here (default: a temporary folder)"
    )
    parser.add_argument("--report", type=Path, default=Path("demo-report.json"), help="where the measurements go")
    parser.add_argument("--curves", type=Path, default=Path("demo-curves.png"), help="where the picture goes")
    parser.add_argument("--examples", type=Path, default=EXAMPLES, help="folder with the version folders")
    parser.add_argument("--engine", choices=sorted(ENGINES), help="have galleries lie in an engine of its own")
    parser.add_argument("--items", type=int, help="store only the first so many images")
    parser.add_argument("--queries", type=int, help="ask with only the first so many images")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
