"""`regraft plan`: what moving a gallery would cost."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

import pytest

from index.errors import InvalidVersionFolder
from staging.inputs.builders import make_version, tell_no_side


@pytest.mark.parametrize("rate", ["0", "-5", "nan", "inf"])
def test_a_plan_takes_possible_rates_only(run, rate):
    for option in ("--reencode-rate", "--transform-rate"):
        code, _, shown = run("plan", "a", "b", option, rate)

        assert (code, "must be a number above 0" in shown) == (2, True)


def test_a_plan_from_a_version_to_itself_is_refused(run):
    version = Path(__file__).parents[2] / "examples" / "v1"

    code, _, shown = run("plan", version, version)

    assert (code, "same version 'v1'" in shown) == (1, True)


def test_a_plan_of_models_that_cannot_be_counted_still_tells_time_and_bytes(run, monkeypatch):
    examples = Path(__file__).parents[2] / "examples"
    command = ["plan", examples / "photos-v1", examples / "photos-v2", "--reencode-rate", 100]

    code, counted, _ = run(*command)
    monkeypatch.setattr("index.evaluation.macs.encoder_macs", Mock(side_effect=InvalidVersionFolder("unknown")))
    _, shown, _ = run(*command)

    assert code == 0
    assert counted.splitlines()[1].split()[:7] == ["reencode", "2.8", "h", "93.1", "GiB", "1.19e+07", "1.19e+13"]
    assert shown.splitlines()[1].split()[:6] == ["reencode", "2.8", "h", "93.1", "GiB", "unknown"]


@pytest.mark.parametrize(("kib", "shown"), [(999, ["999", "KiB"]), (1016, ["0.992", "MiB"]), (1024, ["1", "MiB"])])
def test_sizes_have_no_exponent(run, kib, shown):
    examples = Path(__file__).parents[2] / "examples"
    rates = ("--reencode-rate", 100, "--transform-rate", 100)

    _, table, _ = run("plan", examples / "v1", examples / "v2-bct", *rates, "--items", kib, "--image-bytes", 1024)

    assert table.splitlines()[1].split()[3:5] == shown


def test_a_plan_prices_a_provider(run, tmp_path):
    limits = {"price": 0.13, "tokens_per_minute": 1e6, "batch_size": 100}
    card = {"format": 1, "name": "new", "dim": 8, "space": {"kind": "cosine"}}
    for name, api in (("priced", limits), ("free", {})):
        (tmp_path / name).mkdir()
        said = {**card, "api": {"url": "http://api.example/v1", "model": "m", **api}}
        (tmp_path / name / "card.json").write_text(json.dumps(said))
    old = make_version(tmp_path / "old", "old", 4).folder

    code, shown, said = run("plan", old, tmp_path / "priced", "--items", 2_000_000, "--item-tokens", 50, "--json")
    told = run("plan", old, tmp_path / "free", "--item-tokens", 50)[1]

    assert said == ""
    (way,) = json.loads(shown)["ways"]
    assert (code, way["tokens"], way["price"]) == (0, 100_000_000, pytest.approx(13.0))
    assert (way["seconds"], way["bytes_read"], way["macs"]) == (pytest.approx(6000), 0, None)
    assert "about 50,000,000 tokens, no price in the version's card" in told
    assert "unknown" in told


@pytest.mark.parametrize(("name", "side_dim"), [("telling", 2), ("mute", 0)])
def test_a_plan_counts_side_information_if_the_edge_gives_it(run, tmp_path, name, side_dim):
    old = make_version(tmp_path / "old", "old", 4)
    new = make_version(tmp_path / name, name, 5, side_dim=2, edges=[(old, "forward")])
    new = new if side_dim else tell_no_side(new, "old")

    shown = run("plan", old.folder, new.folder, "--items", 10, "--reencode-rate", 5, "--json")[1]

    told = json.loads(shown)
    added = {one["way"]: one["bytes_after"] - one["bytes_before"] for one in told["ways"]}
    assert added == {"reencode": 10 * (5 + 2) * 4, "transform": 10 * (5 + side_dim) * 4}
