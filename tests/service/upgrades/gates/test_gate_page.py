"""The page of a gate: what was measured, the axes, and the queries that a new version gets wrong, as images."""

from __future__ import annotations

import base64
import io
import json
import re
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sqlalchemy import select, update

from index.encoders.encoder import Encoder
from index.version import Version
from service.http.upgrades.gate_plots import differences, ticks
from service.store.tables import item
from service.upgrades.gates import measuring
from staging.api import steps
from staging.inputs.builders import image_bytes, make_image, make_version


@pytest.fixture(scope="module", autouse=True)
def wrong(served: Any, versions: dict[str, Version], tmp_path_factory: Any) -> Version:
    """A version whose queries are compared with v1's items as they are, and do not belong there."""
    folder = tmp_path_factory.mktemp("wrong") / "wrong"
    made = make_version(folder, "wrong", 4, seed=5, edges=[(versions["v1"], "identity")])
    assert served.register(made).status_code == 201
    return made


@pytest.fixture
def filled(served: Any, pictures: list[bytes]) -> str:
    """A gallery of twenty labelled pictures; `i0` is large."""
    large = image_bytes(make_image(0, 0).resize((400, 200)))
    return served.filled([large, *pictures[1:]], about=lambda n: {"digit": n % 5})


def gate(served: Any, path: str, **body: Any) -> Any:
    made = served.http.post(f"{path}/gates", json={"version": "wrong", **body})
    assert made.status_code == 201, made.text
    return made.json()


def page(served: Any, path: str, report: Any) -> str:
    shown = served.http.get(f"{path}/gates/{report['id']}/page")
    assert shown.status_code == 200, shown.text
    assert shown.headers["content-security-policy"].endswith("img-src data:")
    return str(shown.text)


def images(text: str) -> dict[str, Image.Image]:
    """Every image of the page by its text; all of them are part of it."""
    found = re.findall(r'<img src="data:image/jpeg;base64,([^"]+)" alt="([^"]*)">', text)
    assert text.count("src=") == len(found)
    return {name: Image.open(io.BytesIO(base64.b64decode(data))) for data, name in found}


def ends(report: Any) -> set[str]:
    return {flip[end]["id"] for flip in report["flips"] for end in ("query", "wrong")}


class TestFlips:
    @pytest.mark.parametrize("fields", [{"label": "digit"}, {"k": 3}, {"label": "digit", "metric": "TAR@FAR"}])
    def test_they_are_the_deepest_falls_with_what_was_found_instead(
        self,
        served: Any,
        filled: str,
        versions: dict[str, Version],
        wrong: Version,
        pictures: list[bytes],
        monkeypatch: pytest.MonkeyPatch,
        fields: dict[str, Any],
    ) -> None:
        whole = gate(served, filled, **fields)
        monkeypatch.setattr(measuring, "MAX_FLIPS", 3)
        report = gate(served, filled, **fields)

        pixels = [Image.open(io.BytesIO(served.http.get(f"{filled}/items/i{n}/image").content)) for n in range(20)]
        old, new = (Encoder(version).encode(pixels).vectors for version in (versions["v1"], wrong))
        expected = {}
        for n in range(20):
            pairs = ((old, old), (new, old), (new, new))
            before, after, own = (np.argsort(-(items @ queries[n])).tolist() for queries, items in pairs)
            before, after, own = ([m for m in ranking if m != n] for ranking in (before, after, own))
            right = set(range(n % 5, 20, 5)) - {n} if "label" in fields else set(own[:3])
            if before[0] in right and after[0] not in right:
                expected[f"i{n}"] = (f"i{after[0]}", 1 + next(r for r, m in enumerate(after) if m in right))
        found = {flip["query"]["id"]: (flip["wrong"]["id"], flip["rank"]) for flip in whole["flips"]}
        falls = [flip["rank"] for flip in whole["flips"]]

        assert len(expected) == whole["negative_flips"] > 3
        assert len(found) == min(len(expected), 12)
        assert found.items() <= expected.items()
        assert falls == sorted((rank for _, rank in expected.values()), reverse=True)[:12]
        assert report["flips"] == whole["flips"][:3]
        first = report["flips"][0]["query"]
        assert first["label"] == (str(int(first["id"][1:]) % 5) if "label" in fields else None)

    def test_they_are_shown_as_small_images_or_else_by_their_ids(self, served: Any, filled: str) -> None:
        report = gate(served, filled, label="digit")
        gone, broken, *rest = sorted(ends(report) - {"i0"})
        assert served.http.delete(f"{filled}/items/{gone}").status_code == 204
        with served.runtime.database.write() as connection:
            number = connection.execute(select(item.c.gallery_id).order_by(item.c.id.desc())).scalar()
            mine = item.c.gallery_id == number
            (garbage,) = served.runtime.blobs.write(number, [b"no image"])
            connection.execute(update(item).where(mine, item.c.external_id == broken).values(blob=garbage))

        text = page(served, filled, report)
        shown = images(text)

        assert set(shown) == ends(report) - {gone, broken}
        assert rest
        assert all(max(image.size) <= 96 for image in shown.values())
        assert "i0" not in shown or shown["i0"].size == (96, 48)
        assert f">{gone}<" in text
        assert f">{broken}<" in text

    def test_a_store_out_of_reach_leaves_ids(
        self, served: Any, filled: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
    ) -> None:
        report = gate(served, filled, label="digit")
        monkeypatch.setattr(served.runtime.blobs, "_root", str(tmp_path / "away"))

        text = page(served, filled, report)

        assert images(text) == {}
        assert f">{report['flips'][0]['query']['id']}<" in text

    def test_entries_of_an_evaluation_set_are_shown_by_their_numbers(
        self, served: Any, filled: str, pictures: list[bytes]
    ) -> None:
        entries = [{"label": n % 5, "image": str(n)} for n in range(20)]
        files = [("images", (str(n), picture)) for n, picture in enumerate(pictures)]
        data = {"entries": json.dumps(entries)}
        number = served.http.post(f"{filled}/evaluations", data=data, files=files).json()["id"]
        report = gate(served, filled, evaluation=number)

        assert ends(report) <= {str(n) for n in range(20)}
        assert set(images(page(served, filled, report))) == ends(report)
        assert served.remove(f"{filled}/evaluations/{number}").status_code == 204
        assert images(page(served, filled, report)) == {}

    def test_an_entry_is_not_taken_for_the_item_whose_id_is_its_number(
        self, served: Any, pictures: list[bytes]
    ) -> None:
        path = served.gallery("v1")
        ids = [str((n - 8) % 20) for n in range(20)]  # so that items are found whose ids are numbers of flips
        served.ingest(path, {ids[n]: image_bytes(make_image(n % 5, n).resize((40, 20))) for n in range(20)})
        files = [("images", (str(n), image_bytes(make_image(n % 5, 100 + n).resize((20, 40))))) for n in range(20)]
        entries = [{"relevant": ids[n % 5 : 20 : 5], "image": str(n)} for n in range(20)]
        data = {"entries": json.dumps(entries)}
        number = served.http.post(f"{path}/evaluations", data=data, files=files).json()["id"]
        report = gate(served, path, evaluation=number)
        flips = report["flips"]
        assert {flip["query"]["id"] for flip in flips} & {flip["wrong"]["id"] for flip in flips}

        def sizes() -> list[list[tuple[int, int]]]:
            rows = re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td>", page(served, path, report), re.DOTALL)
            return [[image.size for text in row for image in images(text).values()] for row in rows]

        assert sizes() == [[(20, 40), (40, 20)]] * len(flips)
        assert served.remove(f"{path}/evaluations/{number}").status_code == 204
        assert sizes() == [[(40, 20)]] * len(flips)

    def test_embeddings_are_listed_by_their_numbers(self, served: Any, filled: str) -> None:
        turn = np.eye(4)
        rows = [turn[0], turn[0], turn[1], turn[1]]
        swapped = [turn[1], turn[0], turn[1], turn[1]]
        embeddings = {"v1": np.array(rows).tolist(), "wrong": np.array(swapped).tolist()}
        entries = [{"label": name} for name in ("<i>a", "<i>a", "b", "b")]
        body = {"entries": entries, "embeddings": embeddings}
        number = served.http.post(f"{filled}/evaluations", json=body).json()["id"]
        report = gate(served, filled, evaluation=number)

        ((query, found, rank),) = [(f["query"], f["wrong"], f["rank"]) for f in report["flips"]]
        assert (query, found, rank) == ({"id": "0", "label": '"<i>a"'}, {"id": "2", "label": '"b"'}, 3)
        text = page(served, filled, report)
        assert images(text) == {}
        assert "label &lt;i&gt;a" in text

    def test_what_users_wrote_cannot_become_markup_and_long_labels_are_cut(
        self, served: Any, pictures: list[bytes]
    ) -> None:
        path = served.gallery("v1")
        ids = [f'"><script>{n}' for n in range(20)]
        items = [{"id": i, "metadata": {"d": f"<b>{'x' * 900}{n % 5}"}, "image": str(n)} for n, i in enumerate(ids)]
        served.post_items(path, items, [(str(n), picture) for n, picture in enumerate(pictures)])
        report = gate(served, path, label="d")

        text = page(served, path, report)

        assert report["flips"]
        assert {len(flip["wrong"]["label"]) for flip in report["flips"]} == {200}
        assert "<script" not in text
        assert "<b>" not in text
        assert text.count('alt="&#34;&gt;&lt;script&gt;') == 2 * len(report["flips"])


def test_it_says_what_was_measured_when_and_by_whom(served: Any, filled: str) -> None:
    report = gate(served, filled, label="digit", sample=8, seed=3, metric="mAP@1.0")

    facts = dict(re.findall(r"<tr><th>([^<]*)</th><td>([^<]*)</td></tr>", page(served, filled, report)))

    assert (facts["label"], facts["metric"], facts["seed"], facts["by"]) == ("digit", "mAP@1.0", "3", report["who"])
    assert facts["queries"].startswith(f"{report['queries']} (at most 8, sampled)")
    assert facts["items in the gallery"] == "20 (all comparable items)"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", facts["date"])


class TestAxes:
    def test_each_plot_has_a_named_axis_with_numbers(self, served: Any, filled: str) -> None:
        report = gate(served, filled, label="digit", slice="digit")

        plots = re.findall(r"<svg.*?</svg>", page(served, filled, report))

        assert len(plots) == 2 + bool(report["slices"])
        assert re.findall(r'class="tick"[^>]*>([^<]*)<', plots[0]) == ["0%", "25%", "50%", "75%", "100%"]
        assert [plot.count('class="axis"') for plot in plots] == [1] * len(plots)

    @pytest.mark.parametrize("most", [0.013, 0.9, 1, 2.4, 2.5, 5, 9.99, 10, 37.2, 100])
    def test_ticks_are_few_and_within(self, most: float) -> None:
        at = ticks(most)

        assert 0 in at
        assert at == [-tick for tick in reversed(at)]
        assert most / 2 < at[-1] <= most * (1 + 1e-9)
        assert 5 <= len(at) <= 9

    def test_nothing_that_differs_is_drawn_too(self) -> None:
        assert ">0<" in differences([("all", {"value": 0.0, "low": 0.0, "high": 0.0})], "points")


def test_it_shows_the_report_and_loads_nothing(served: Any, pictures: list[bytes]) -> None:
    path = served.filled(pictures, about=lambda n: {"digit": n % 5})
    report = steps.gate(served, path, "v2", label="digit", slice="digit").json()

    shown = served.http.get(f"{path}/gates/{report['id']}/page")

    assert shown.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in shown.headers["content-security-policy"]
    assert report["verdict"] in shown.text
    assert f"{report['new_old']['value']:.1%}" in shown.text
    assert shown.text.count("<svg") == 2 + bool(report["slices"])
    assert "<script" not in shown.text
    assert "src=" not in shown.text
    assert served.http.get(f"{path}/gates/{10**9}/page").status_code == 404


def test_slices_read_as_they_were_written(served: Any, pictures: list[bytes]) -> None:
    path = served.gallery("v1")
    shops = ["ok", 3]
    items = [{"id": str(n), "metadata": {"shop": shops[n % 2], "l": n % 4}, "image": str(n)} for n in range(20)]
    served.post_items(path, items, [(str(n), picture) for n, picture in enumerate(pictures)])
    report = steps.gate(served, path, "v2", label="l", slice="shop").json()

    text = served.http.get(f"{path}/gates/{report['id']}/page").text

    assert {one["value"] for one in report["slices"]} == {'"ok"', "3"}
    assert ">ok (10)<" in text
    assert ">3 (10)<" in text


def test_what_users_wrote_cannot_become_markup(served: Any, pictures: list[bytes]) -> None:
    path = served.gallery("v1")
    field = "<script>alert(1)</script>"
    items = [{"id": str(n), "metadata": {field: f"<b>{n % 2}</b>", "l": n % 2}, "image": str(n)} for n in range(12)]
    served.post_items(path, items, [(str(n), pictures[n]) for n in range(12)])
    number = steps.gate(served, path, "v2", label="l", slice=field).json()["id"]

    text = served.http.get(f"{path}/gates/{number}/page").text

    assert "<script" not in text
    assert "<b>" not in text
    assert "&lt;b&gt;" in text
