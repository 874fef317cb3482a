"""The table of a comparison from measurements made by hand, and which references some methods need."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from index.errors import InvalidArgument
from training.comparison.papers import PROTOCOLS, beside, ordering
from training.comparison.runs import COMPARED_FAMILIES, Run, parts_for, runs_of, time_limit
from training.comparison.table import COLUMNS, merge_table, read_pair_scores, replace_table, table
from training.evaluation.plots import as_svg, pairs_figure


def write_results(run: Run, part: str, *, seconds: float | None = 3.0, **values: list[float]) -> None:
    run.folder.mkdir(parents=True, exist_ok=True)
    arrays = {pair.replace("_", "/"): np.array(x) for pair, x in values.items()}
    np.savez(run.results_file(part), **{f"{pair} {m}": x for pair, x in arrays.items() for m in ("cmc@1", "mAP@1.0")})
    run.note_file(part).write_text(json.dumps({"seconds": seconds, "made_of": {}}))


def test_a_row_is_the_mean_over_seeds_with_the_deviation_over_them(tmp_path: Path) -> None:
    runs = runs_of(COMPARED_FAMILIES["digits"], tmp_path, 3, [])
    for run, second in zip(runs[:2], (0.0, 1.0), strict=True):
        write_results(run, "independent", old_old=[1, 0, 0, 0], new_old=[0, 0, 0, 0], new_new=[1, 1, 1, 0])
        write_results(run, "oca", old_old=[1 - second, 0, 0, 0], new_old=[0, 1, second, 0], new_new=[1, 1, 1, 1])
    text = table(runs, ["v1", "independent", "oca"])
    lines = text.split("\n")
    header, _, independent, oca = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
    cells = dict(zip(COLUMNS, oca, strict=True))

    assert tuple(header) == COLUMNS
    assert cells["old/old"].startswith("12.5 (")
    assert cells["new/old"].startswith("37.5 (")
    assert (cells["P_com"], cells["P_up"], cells["flips"]) == ("0.400", "+0.333", "12.5%")
    assert cells["seeds"] == "2"
    assert (cells["sd new/old"], cells["sd gain"], cells["sd new/new"]) == ("17.7", "35.4", "0.0")
    assert independent[0] == "independent"
    ((method, found),) = read_pair_scores(text)
    assert method == "oca"
    assert [score.value for score in found] == [0.125, 0.375, 1.0]
    assert as_svg(pairs_figure(read_pair_scores(text))) == as_svg(pairs_figure(read_pair_scores(text)))


def test_a_training_that_was_interrupted_has_no_seconds(tmp_path: Path) -> None:
    runs = runs_of(COMPARED_FAMILIES["digits"], tmp_path, 2, [])
    for run, seconds in zip(runs, (None, 5.0), strict=True):
        write_results(run, "bct", seconds=seconds, new_new=[1])
    write_results(runs[0], "l2", seconds=None, new_new=[1])
    _, _, bct, l2 = table(runs, ["bct", "l2"]).splitlines()

    assert [line.split("|")[-2].strip() for line in (bct, l2)] == ["5", ""]


def test_a_row_has_no_share_of_the_independent_gain_before_that_is_measured(tmp_path: Path) -> None:
    (run,) = runs_of(COMPARED_FAMILIES["digits"], tmp_path, 1, [])
    write_results(run, "bct", old_old=[1, 0, 0, 0], new_old=[1, 1, 0, 0], new_new=[1, 1, 1, 0])
    *_, line = table([run], ["bct"]).splitlines()
    cells = dict(zip(COLUMNS, (cell.strip() for cell in line.split("|")[1:-1]), strict=True))

    assert (cells["P_com"], cells["P_up"], cells["flips"]) == ("", "", "0.0%")


def test_a_loss_is_no_share_of_what_a_worse_independent_version_loses(tmp_path: Path) -> None:
    protocol = PROTOCOLS["cifar100-b"]
    (run,) = runs_of(COMPARED_FAMILIES[protocol.family], tmp_path, 1, [])
    write_results(run, "independent", old_old=[1, 1, 0, 0], new_old=[0, 0, 0, 0], new_new=[1, 0, 0, 0])
    for part, new_old in (("bct", [1, 0, 0, 0]), ("l2", [0, 0, 0, 0])):
        write_results(run, part, old_old=[1, 1, 0, 0], new_old=new_old, new_new=[1, 1, 0, 0])
    *_, line = table([run], ["bct"]).splitlines()
    cells = dict(zip(COLUMNS, (cell.strip() for cell in line.split("|")[1:-1]), strict=True))

    assert (cells["P_com"], cells["P_up"]) == ("", "+1.000")
    assert beside(protocol, [run], ["bct"]).splitlines()[-1].split("|")[6:8] == ["  ", "  "]
    assert "ours (1 seed)" not in dict(ordering(protocol, [run], ["bct", "l2"]))


def test_a_table_is_put_between_its_marks_and_nowhere_else(tmp_path: Path) -> None:
    document = tmp_path / "results.md"
    document.write_text("a\n<!-- table x -->\nold\n<!-- end -->\nb\n")
    replace_table(document, "x", "| new \\1 |")

    assert document.read_text() == "a\n<!-- table x -->\n\n| new \\1 |\n\n<!-- end -->\nb\n"
    with pytest.raises(InvalidArgument, match="no place marked <!-- table y -->"):
        replace_table(document, "y", "")


def test_rows_of_methods_that_are_not_measured_here_stay_in_the_document(tmp_path: Path) -> None:
    (run,) = runs_of(COMPARED_FAMILIES["digits"], tmp_path, 1, [])
    write_results(run, "bct", old_old=[1, 0], new_old=[0, 0], new_new=[1, 1])
    mine = table([run], ["bct"])
    header, rule, bct = mine.splitlines()
    document = tmp_path / "results.md"
    document.write_text(
        f"<!-- table x -->\n\n{header}\n{rule}\n| hbct | 3 |\n| bct | 2 |\n| l2 | 1 |\n\n<!-- end -->\n"
    )
    whole = merge_table(document, "x", mine)

    lines = [header, rule, "| l2 | 1 |", bct, "| hbct | 3 |"]
    assert document.read_text() == "\n".join(["<!-- table x -->", "", *lines, "", "<!-- end -->", ""])
    assert whole == "\n".join(lines)

    document.write_text("<!-- table x -->\n<!-- end -->\n")
    merge_table(document, "x", mine)
    assert document.read_text() == f"<!-- table x -->\n\n{mine}\n\n<!-- end -->\n"


def test_methods_bring_the_references_they_need() -> None:
    assert parts_for(["bct"]) == ["v1", "independent", "bct"]
    assert parts_for(["hbct"]) == ["hyperbolic_v1", "hyperbolic_independent", "hbct"]
    assert parts_for(["fct"])[:3] == ["v1", "side_v1", "independent"]
    assert set(parts_for(None)) == set(COMPARED_FAMILIES["digits"].parts())


def test_a_setting_may_be_for_one_recipe_alone(tmp_path: Path) -> None:
    (run,) = runs_of(COMPARED_FAMILIES["digits"], tmp_path, 1, ["epochs=3", "fct.epochs=7", "preprocess.height=9"])
    assert [run.recipe(part).epochs for part in ("v1", "bct", "fct")] == [3, 3, 7]
    assert run.recipe("fct").preprocess.height == 9


def test_a_setting_that_a_recipe_lacks_is_refused_though_that_recipe_may_not_be_trained(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="recipe digits_fct has no field 'nonsense'"):
        runs_of(COMPARED_FAMILIES["digits"], tmp_path, 1, ["fct.nonsense=3"])


def test_a_time_limit_ends_as_ctrl_c_does_and_leaves_no_alarm_behind() -> None:
    with pytest.raises(KeyboardInterrupt), time_limit(0.001):
        time.sleep(5)
    with time_limit(None):
        time.sleep(0.07)


def test_ours_stand_below_the_papers_rows_and_are_ordered_alike(tmp_path: Path) -> None:
    protocol = PROTOCOLS["cifar100-a"]
    runs = runs_of(COMPARED_FAMILIES[protocol.family], tmp_path, 1, [])
    found = {"v1": [1, 1, 0, 0], "independent": [0, 0, 0, 0], "bct": [1, 1, 1, 0], "bt2": [1, 0, 0, 0]}
    for part, new_old in found.items():
        write_results(runs[0], part, old_old=[1, 1, 0, 0], new_old=new_old, new_new=[1, 1, 1, 1])
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in beside(protocol, runs, ["bct", "bt2"]).split("\n")
    ]

    assert rows[2] == ["bct", "BT2's run", "33.6 [24.4]", "23.5 [23.9]", "56.1 [43.6]", "-0.347", "-0.020"]
    assert rows[4] == ["bct", "ours (1 seed)", "50.0 [50.0]", "75.0 [75.0]", "100.0 [100.0]", "0.500", "0.500"]
    assert set(ordering(protocol, runs, ["v1", "bct", "bt2", "oca"])) == {
        ("BT2", "bt2 > old/old > bct"),
        ("OCA", "oca > bt2 > bct > old/old"),
        ("ours (1 seed)", "bct > old/old > bt2"),
    }


def test_a_share_of_the_independent_gain_is_of_the_seeds_that_the_method_has(tmp_path: Path) -> None:
    protocol = PROTOCOLS["cifar100-b"]
    runs = runs_of(COMPARED_FAMILIES[protocol.family], tmp_path, 2, [])
    for run, new_new in zip(runs, ([1, 1, 1, 0], [1, 1, 1, 1]), strict=True):
        write_results(run, "independent", old_old=[1, 0, 0, 0], new_old=[0, 0, 0, 0], new_new=new_new)
    write_results(runs[0], "bct", old_old=[1, 0, 0, 0], new_old=[1, 1, 0, 0], new_new=[1, 1, 1, 0])
    ours = beside(protocol, runs, ["bct"]).splitlines()[-1]

    assert ours.split("|")[2].strip() == "ours (1 seed)"
    assert ours.split("|")[6].strip() == "0.500"
    assert "| 0.500 |" in table(runs, ["bct"])


def test_every_paper_row_is_of_a_method_that_its_family_trains() -> None:
    for protocol in PROTOCOLS.values():
        assert set(protocol.published) <= set(COMPARED_FAMILIES[protocol.family].parts())


@pytest.mark.parametrize("part", ["npz", "json"])
def test_half_a_file_counts_as_none(part: str, tmp_path: Path) -> None:
    (run,) = runs_of(COMPARED_FAMILIES["digits"], tmp_path, 1, [])
    write_results(run, "bct", old_old=[1, 0], new_old=[0, 0], new_new=[1, 1])
    half = tmp_path / "seed0" / f"digits_bct.{part}"
    half.write_bytes(half.read_bytes()[:20])

    assert (run.results("bct") is None, run.seconds("bct")) == ((True, 3.0) if part == "npz" else (False, None))
