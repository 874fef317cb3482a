"""The demo as a user runs it: `python -m examples.demo`, shortened, and whole as a slow test."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from examples.demo.engines import ENGINES

ROOT = Path(__file__).parent.parent.parent
WAYS = {"bct", "oca", "fct"}
SHORT = ["--items", "200", "--queries", "160"]


def demo(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    files = ["--report", str(folder / "report.json"), "--curves", str(folder / "curves.png")]
    command = [sys.executable, "-m", "examples.demo", *files, *options]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(SHORT, id="shortened", marks=pytest.mark.slow),
        pytest.param([], id="whole", marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
        *(
            pytest.param([*SHORT, "--engine", name], id=name, marks=[pytest.mark.slow, pytest.mark.timeout(900)])
            for name in ENGINES
        ),
    ],
)
def test_the_demo_meets_every_expectation_and_leaves_its_report(size, tmp_path):
    ended = demo(tmp_path, *size)

    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert [report[n] for n in ("failed_queries", "failed_writes", "lost_items", "resurrected_items")] == [0] * 4
    assert report["queries_served"] > 100
    assert report["acknowledged_writes"] > 50
    assert set(report["table"]) == set(report["curves"]) == set(report["rollback"]) == WAYS
    for way in WAYS:
        for row in ("old_old", "new_old", "new_new"):
            scores = report["table"][way][row]
            assert set(scores) == {"cmc1", "cmc5", "map"}
            assert all(0 < s["low"] <= s["value"] <= s["high"] <= 1 for s in scores.values())
        assert report["differences"][way]["new_old - old_old"]["cmc1"]["low"] > 0
        curve = report["curves"][way]
        assert (curve[0]["moved"], curve[-1]["moved"]) == (0, 1)
        assert curve[-1]["cmc1"] == report["table"][way]["new_old" if way == "fct" else "new_new"]["cmc1"]["value"]
        live = report["live_curves"][way]
        assert live["state"] == "complete"
        assert (live["points"][0]["share"], live["points"][-1]["share"]) == (0, 1)
        assert report["rollback"][way]["answers_equal_old_old"] is True
        assert report["rollback"][way]["forward_answers_equal_new_new"] is True
    assert report["routes"]["fct"] == {"at_deploy": ["dual"], "new_old": ["same"], "new_new": ["same"]}
    assert report["kill"]["state_equal"] is report["kill"]["answers_equal"] is True
    assert 0.4 < report["kill"]["moved"] < 1
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert ended.stdout.rstrip().endswith(f"the story as a picture: {tmp_path / 'curves.png'}")
    assert len(report["examples"]) == 6
    steps = report["steps"]
    assert steps["shadow"]["counted"]["compared"] == steps["shadow"]["asked"] == 40
    assert 0 < steps["shadow"]["counted"]["overlap"] < 1
    assert set(steps["canary"]["answered_by"]) == {"v1", "v2-oca"}
    assert sum(steps["canary"]["answered_by"].values()) == 60
    backfill = steps["backfill"]
    assert backfill["workers"] == ["remote"]
    assert backfill["moved_remotely"] == steps["items"] == 150
    assert 0 < backfill["pause"]["at_end"]["done"] < backfill["rollback"]["done"] < 150
    assert backfill["rollback"]["rankings_equal"] is True
    assert [one["state"] for one in steps["deployments"]] == ["superseded", "rolled_back", "superseded", "current"]
    assert "<svg" in (tmp_path / steps["gate"]["page"]).read_text()


def test_a_demo_that_cannot_go_on_says_why_and_leaves_no_service_behind(tmp_path):
    ended = demo(tmp_path, "--examples", str(tmp_path), "--keep", str(tmp_path / "kept"), "--items", "20")

    assert ended.returncode == 1
    assert "the demo stopped: " in ended.stdout
    assert "Traceback" not in ended.stdout + ended.stderr
    url = re.search(r"http://127\.0\.0\.1:\d+", ended.stdout)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url.group()}/v1/health", trust_env=False)
