"""Reports: complete, self-contained, and never half written."""

from __future__ import annotations

import base64
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from matplotlib.patches import Rectangle

from index.errors import Unwritable
from index.evaluation.metrics import Compared
from index.space import Cosine
from index.version import Version
from index.version_folder.folder import load_version, write_card
from training.data.images import Data
from training.evaluation import report as module
from training.evaluation.loss_curves import read_loss_curves
from training.evaluation.matches import choose_queries, first_items
from training.evaluation.matrix import Evaluation, evaluate
from training.evaluation.plots import as_svg, bars_figure, curves_figure, learning_figure, matrix_figure
from training.evaluation.report import render_report, report_of, report_version, write_evaluation, write_report

RECIPE = {"name": "a<b", "options": {"weight": 2.0}, "old": "", "classes": None, "steps": list(range(40))}


@pytest.fixture(scope="module")
def data(image_set: Callable) -> Data:
    gallery = image_set(30, 5, 0)
    return Data(gallery, image_set(20, 5, 1000), gallery)


@pytest.fixture(scope="module")
def versions(make_version: Callable, tmp_path_factory: pytest.TempPathFactory) -> list[Version]:
    place = tmp_path_factory.mktemp("versions")
    v1 = make_version(place / "v1", "v1", 2)
    v2 = make_version(place / "v2", "v2", 4, drift=0.3, edges=[(v1, "truncate")])
    card = {**vars(v2.card), "recipe": RECIPE, "data": {"fingerprint": "f00d", "images": 7}}
    write_card(v2.folder, type(v2.card)(**card))
    return [v1, load_version(v2.folder)]


@pytest.fixture(scope="module")
def measured(versions: list[Version], data: Data) -> Evaluation:
    return evaluate(versions, data, points=3)


class Tags(HTMLParser):
    """Collects what a page refers to, and checks that its tags close."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.sources += [value or "" for name, value in attrs if name in {"src", "href"}]
        if tag not in {"meta", "img"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_one_file_with_its_pictures_inside(measured: Evaluation) -> None:
    html = render_report(measured, "v2")
    tags = Tags()
    tags.feed(html)
    assert tags.open == []
    assert not tags.tags & {"script", "link", "iframe"}
    assert len(tags.sources) == 2
    for source in tags.sources:
        kind, picture = source.split(",")
        assert kind == "data:image/svg+xml;base64"
        assert ET.fromstring(base64.b64decode(picture)).tag.endswith("svg")


def test_the_page_holds_every_measurement_the_recipe_and_the_fingerprint(measured: Evaluation) -> None:
    html = render_report(measured, "v2")
    for pair in (("v1", "v1"), ("v2", "v1"), ("v2", "v2")):
        for metric in ("cmc@1", "cmc@5", "mAP@1.0"):
            score = measured.cells[pair].retrieval.interval(metric)
            assert f"{score.value:.3f} ({score.low:.3f} - {score.high:.3f})" in html
        assert f"<td>{'/'.join(pair)}</td>" in html
    assert "20 queries (0 without a relevant item) and 30 items" in html
    assert "reencode, random, calibrated" in html
    rows = dict(re.findall("<tr><td>(.*?)</td><td>(.*?)</td></tr>", html))
    assert rows["name"] == "a&lt;b"
    assert rows["options"] == "weight=2.0"
    assert (rows["old"], rows["classes"]) == ("none", "none")
    assert rows["steps"] == "40: 0 to 39"
    assert rows["fingerprint"] == "f00d"
    assert rows["sha256 of encoder.onnx"] == measured.cards["v2"].encoder


def test_the_page_of_a_first_version_has_no_upgrade(measured: Evaluation, versions: list[Version], data: Data) -> None:
    html = render_report(evaluate(versions[:1], data), "v1")
    assert "new/old" not in html
    assert html.count("<img") == 1


def test_the_report_lies_beside_the_folder_which_stays_under_the_contract(versions: list[Version], data: Data) -> None:
    folder = versions[1].folder
    made = report_version(folder, versions[0], data)
    assert made == report_of(folder) == folder.parent / "v2-report.html"
    assert "v2 over v1" in made.read_text()
    assert load_version(folder) == versions[1]


def test_without_matplotlib_there_is_no_report_and_no_picture(
    versions: list[Version], measured: Evaluation, data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "can_draw", lambda: False)
    assert report_version(versions[1].folder, None, data) is None
    assert [path.name for path in write_evaluation(measured, tmp_path / "out")] == ["evaluation.json"]


def test_a_report_that_cannot_be_written_leaves_the_last_one(
    measured: Evaluation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "v2-report.html"
    path.write_text("last")

    def full_disk(self: Path, content: bytes) -> None:
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full_disk)
    with pytest.raises(Unwritable, match=r"v2-report\.html could not be written: No space left"):
        write_report(measured, "v2", path)
    assert path.read_text() == "last"
    assert list(tmp_path.iterdir()) == [path]


def test_an_evaluation_leaves_json_and_pictures(measured: Evaluation, tmp_path: Path) -> None:
    written = write_evaluation(measured, tmp_path / "a" / "b")
    assert [path.name for path in written] == ["evaluation.json", "matrix.svg", "curves.svg"]
    assert json.loads(written[0].read_text())["queries"] == 20
    for path in written[1:]:
        assert ET.parse(path).getroot().tag.endswith("svg")


def test_pictures_show_each_number_once_and_the_same_figure_gives_the_same_bytes(measured: Evaluation) -> None:
    panels = matrix_figure(measured).axes
    assert [panel.get_title() for panel in panels] == ["cmc@1", "cmc@5", "mAP@1.0"]
    values = measured.matrix("cmc@1").values
    assert [text.get_text() for text in panels[0].texts] == [f"{v:.3f}" for v in values[np.isfinite(values)]]
    (panel,) = curves_figure(measured).axes
    raw, calibrated = panel.lines[:2]
    np.testing.assert_allclose(raw.get_ydata(), measured.curves["v2", "v1", "reencode", "random", "raw"].curve.values)
    assert (raw.get_linestyle(), calibrated.get_linestyle()) == ("--", "-")
    bars = [("v1/v1", [measured.cells["v1", "v1"].retrieval.interval(m) for m in ("cmc@1", "cmc@5", "mAP@1.0")])]
    heights = [bar.get_height() for bar in bars_figure(bars).axes[0].patches if isinstance(bar, Rectangle)]
    assert heights == pytest.approx([score.value for score in bars[0][1]])
    assert as_svg(bars_figure(bars)) == as_svg(bars_figure(bars))


def test_no_curves_are_no_figure(versions: list[Version], data: Data) -> None:
    with pytest.raises(ValueError, match="no backfill curve"):
        curves_figure(evaluate(versions[:1], data))


def test_the_page_says_in_words_whether_the_version_is_compatible(measured: Evaluation) -> None:
    gain = measured.upgrades["v2", "v1"].difference["cmc@1"]
    html = render_report(measured, "v2")

    verdict = re.search(r'<p class="verdict (yes|no|)">(.*?)</p>', html)
    assert verdict.group(1) == ("yes" if gain.low > 0 else "no" if gain.high <= 0 else "")
    told = f"{100 * gain.value:+.1f} points, 95 % interval {100 * gain.low:+.1f} to {100 * gain.high:+.1f}"
    assert told in verdict.group(2)


def test_the_page_shows_queries_with_their_first_matches(measured: Evaluation, data: Data) -> None:
    html = render_report(measured, "v2", data)
    rows = re.findall(r'<tr><td>(<img class="query".*?)</tr>', html)

    assert len(rows) == 6
    for row, query in zip(rows, choose_queries(measured, "v2", "v1"), strict=True):
        cells = [re.findall(r'class="(right|wrong)"', cell) for cell in row.split("<td>")[1:]]
        assert [len(marks) for marks in cells] == [5, 5]
        hits = [measured.cells[pair].retrieval.hits[1][query] for pair in (("v1", "v1"), ("v2", "v1"))]
        assert [marks[0] == "right" for marks in cells] == hits


def test_a_query_does_not_find_its_own_image() -> None:
    vectors = np.eye(3, dtype=np.float32)
    compared = Compared(vectors, vectors, Cosine())

    assert first_items(compared, 1, -1)[0] == 1
    assert 1 not in first_items(compared, 1, 1, k=2)
    assert sorted(first_items(compared, 1, 1, k=len(vectors))) == [0, *range(2, len(vectors))]


def test_the_learning_curve_is_the_mean_of_each_epoch_and_the_last_start_counts(
    measured: Evaluation, tmp_path: Path
) -> None:
    for start, rows in (("version_0", "0,1,4,3\n0,2,2,\n1,3,9,1\n"), ("version_1", "1,4,1,nan\n2,5,0.5,2\n")):
        (tmp_path / start).mkdir()
        (tmp_path / start / "metrics.csv").write_text("epoch,step,loss,influence\n" + rows)

    logged = read_loss_curves(tmp_path)

    assert logged == {"loss": {1: 3.0, 2: 1.0, 3: 0.5}, "influence": {1: 3.0, 2: 1.0, 3: 2.0}}
    assert list(logged) == ["loss", "influence"]
    assert "Learning" in render_report(measured, "v2", logged=logged)
    assert read_loss_curves(tmp_path / "nowhere") == {}
    loss, parts = learning_figure(logged).axes
    assert loss.lines[0].get_ydata().tolist() == [3.0, 1.0, 0.5]
    assert (loss.get_title(), parts.get_title()) == ("loss", "its parts")


def test_scores_of_held_out_images_are_no_parts_of_the_loss() -> None:
    logged = {"loss": {1: 3.0, 2: 1.0}, "base": {1: 2.0, 2: 1.0}, "held-out new/new": {1: 0.2, 2: 0.6}}
    panels = {axes.get_title(): axes for axes in learning_figure(logged).axes}

    assert list(panels) == ["loss", "its parts", "CMC-1, held-out images"]
    assert [line.get_label() for line in panels["its parts"].lines] == ["base"]
    assert [line.get_label() for line in panels["CMC-1, held-out images"].lines] == ["new/new"]
    assert [axes.get_title() for axes in learning_figure({"loss": {1: 3.0}}).axes] == ["loss"]


def test_the_learning_curve_begins_with_the_last_training_into_the_folder(tmp_path: Path) -> None:
    for start, rows in (("version_0", "0,1,4\n1,2,2\n2,3,1\n"), ("version_1", "0,1,7\n"), ("version_2", "1,2,5\n")):
        (tmp_path / start).mkdir()
        (tmp_path / start / "metrics.csv").write_text("epoch,step,loss\n" + rows)

    assert read_loss_curves(tmp_path) == {"loss": {1: 7.0, 2: 5.0}}


def test_rows_that_a_kill_or_a_full_disk_cut_off_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "version_0").mkdir()
    rows = "base,epoch,loss,step\n1,0,2,1\n1,0,4,2\n3,1,6,3,9\n3,1,1e"
    for cut in ("", "\n0.", "\n0.1,x,3,4"):
        (tmp_path / "version_0" / "metrics.csv").write_text(rows + cut)

        assert read_loss_curves(tmp_path) == {"loss": {1: 3.0, 2: 6.0}, "base": {1: 1.0, 2: 3.0}}
