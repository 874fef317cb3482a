"""Pairs made on the spot, and how far queries are from the pairs that an edge was fitted on."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from index.errors import InvalidVersionFolder
from index.evaluation.domain import Domain, check_domain, fit_domain, read_domain
from index.evaluation.fitting import split_pairs
from index.space import space_from_json
from index.version import EDGE_DOMAIN
from naive import draw, unit
from staging.api.edges import fit, fit_file
from staging.api.served import problem
from staging.inputs.builders import add_text, image_bytes, make_image, make_version


@pytest.mark.parametrize(("outside", "low", "high"), [(0, 0.0, 0.277533), (1, 0.017876, 0.40415), (10, 0.722467, 1.0)])
def test_the_interval_of_a_share_by_hand(outside: int, low: float, high: float) -> None:
    """Wilson's for 0, 1 and 10 of 10; a query as near as the least is in the domain."""
    east, north = np.eye(2, dtype=np.float32)
    domain = Domain(east[np.newaxis], 1.0)

    found = check_domain(
        domain, np.stack([east] * (10 - outside) + [north] * outside), space_from_json({"kind": "cosine"})
    )

    assert (found.queries, found.outside, found.share) == (10, outside, outside / 10)
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-5)


@pytest.mark.parametrize("space", [{"kind": "cosine"}, {"kind": "l2"}, {"kind": "lorentz", "curvature": 1.0}])
def test_queries_like_the_pairs_are_in_the_domain_and_others_are_not(space: Any) -> None:
    made = space_from_json(space)
    shape = unit if space["kind"] == "cosine" else lambda x: x
    centre = np.zeros(8, np.float32)
    centre[0] = 3
    pairs = split_pairs(shape(draw(900, 8) + centre), draw(900, 4, seed=1), None)
    domain = fit_domain(pairs, made)

    alike = check_domain(domain, shape(draw(1000, 8, seed=2) + centre), made)
    other = check_domain(domain, shape(draw(1000, 8, seed=3) - 3 * centre), made)

    assert (alike.share < 0.04, other.share > 0.9) == (True, True)
    assert 0 <= alike.low <= alike.share <= alike.high <= 1
    assert ("are like the pairs" in alike.in_words(), "Do not trust" in other.in_words()) == (True, True)
    few = check_domain(domain, shape(draw(3, 8, seed=2) + centre), made)
    assert "uncertain" in few.in_words()
    assert min(few.low, 1 - few.high) >= 0


@pytest.mark.parametrize("count", [20, 40, 100])
def test_of_few_pairs_no_queries_like_them_are_distrusted_and_others_are(count: int) -> None:
    """Of 4, 8 or 20 held-out pairs one is out; of 1,000 others like them a quarter, an eighth or a twentieth is."""
    cosine, away = space_from_json({"kind": "cosine"}), 3 * np.eye(16, dtype=np.float32)[0]
    told = []
    for seed in range(20):
        drawn = draw(count + 1000, 16, seed=seed)
        domain = fit_domain(split_pairs(unit(drawn[:count] + away), draw(count, 4), None, seed), cosine)
        alike = check_domain(domain, unit(drawn[count:] + away), cosine)
        assert (alike.held, alike.expected) == (count // 5, 5 / count)
        assert "Do not trust" in check_domain(domain, unit(drawn[count:] - away), cosine).in_words()
        told.append(alike.in_words())

    assert sum("Do not trust" in words for words in told) <= 1
    assert count > 20 or "Fit the edge on more pairs" in "".join(told)


def test_where_the_origin_lies_changes_nothing_in_l2() -> None:
    """Squared distances by |q|^2 - 2 <q, x> + |x|^2 in float32 were 0 between vectors of 3,000 so far from it."""
    l2, far = space_from_json({"kind": "l2"}), np.float32(4096)
    pairs, queries = (
        [np.round(draw(900, 8) * 256) / 256, draw(900, 4, seed=1)],
        np.round(draw(200, 8, seed=2) * 512) / 256,
    )

    near_it, far_of_it = (
        check_domain(fit_domain(split_pairs(pairs[0] + away, pairs[1], None), l2), queries + away, l2)
        for away in (np.float32(0), far)
    )

    assert near_it.outside > 0
    assert far_of_it == near_it


def test_a_domain_is_read_as_it_was_written_and_refused_when_it_is_damaged(tmp_path: Path) -> None:
    made = fit_domain(split_pairs(unit(draw(90, 8)), draw(90, 4, seed=1), None), space_from_json({"kind": "cosine"}))
    made.save(tmp_path)

    held = read_domain(tmp_path, 8)
    assert (held.least, held.reference_RM.tolist()) == (made.least, made.reference_RM.tolist())
    assert (held.held, held.outside) == (made.held, made.outside) == (18, 1)
    np.savez(tmp_path / EDGE_DOMAIN, reference=made.reference_RM, least=np.array([made.least], np.float32))
    earlier = read_domain(tmp_path, 8)  # a file of an earlier release
    assert (earlier.held, earlier.expected, earlier.tolerated) == (0, 0.01, 0.05)
    with pytest.raises(InvalidVersionFolder):
        read_domain(tmp_path, 9)
    (tmp_path / EDGE_DOMAIN).write_bytes(b"no archive")
    with pytest.raises(InvalidVersionFolder):
        read_domain(tmp_path, 8)


@pytest.fixture(scope="module")
def fitted(served: Any) -> dict[str, Any]:
    """`narrow`, fitted to v1 on pairs of which all are near one direction."""
    served.add("narrow", 6, seed=4)
    centre = np.eye(6)[0] * 3
    new = unit(draw(400, 6) + centre)
    edge = fit_file(served, {"new": new, "old": unit(new[:, :4])}, new="narrow")
    assert edge.status_code == 201, edge.text
    return dict(edge.json())


def ask(served: Any, **body: Any) -> Any:
    return served.http.post("/edges:check", json={"new": "narrow", "old": "v1", "kind": "matrix", **body})


def send(served: Any, vectors: Any, **fields: str) -> Any:
    np.save(stream := io.BytesIO(), vectors)
    data = {"new": "narrow", "old": "v1", "kind": "matrix", **fields}
    return served.http.post("/edges:check", data=data, files={"vectors": ("q.npy", stream.getvalue())})


def test_an_edge_is_asked_about_queries_and_items(served: Any, fitted: Any, pictures: list[bytes]) -> None:
    assert fitted["made"]["domain"]["pairs"] == 320
    near, far = np.eye(6)[:1] * 2, -np.eye(6)[:1]
    assert send(served, np.repeat(near, 200, axis=0)).json()["share"] == 0.0
    away = send(served, np.repeat(far, 200, axis=0).astype(np.float32)).json()
    assert (away["share"], away["queries"], "Do not trust" in away["advice"]) == (1.0, 200, True)

    path = served.filled(pictures, "narrow")
    found = ask(served, gallery=path.rpartition("/")[2], sample=7).json()
    assert (found["queries"], 0 <= found["share"] <= 1) == (7, True)


@pytest.mark.parametrize(
    ("body", "status", "code", "pointer"),
    [
        ({"kind": "slerp"}, 404, "unknown_edge", None),
        ({"new": "v2", "kind": "truncate"}, 409, "no_domain", "/kind"),
        ({}, 422, "invalid_argument", "/gallery"),
        ({"gallery": "nowhere"}, 404, "unknown_gallery", None),
        ({"sample": 0}, 422, "invalid_request", "/sample"),
        ({"new": "missing"}, 404, "unknown_version", None),
    ],
)
def test_what_cannot_be_asked_is_named(
    served: Any, fitted: Any, body: Any, status: int, code: str, pointer: str | None
) -> None:
    problem(ask(served, **body), status, code, pointer)
    problem(send(served, np.zeros((2, 3))), 422, "invalid_vector")
    problem(send(served, np.zeros(3)), 422, "invalid_body", "/vectors")
    problem(ask(served, gallery=served.gallery("v1").rpartition("/")[2]), 422, "invalid_argument", "/gallery")


def test_missing_pairs_are_made_of_stored_images_and_texts(served: Any, tmp_path: Any) -> None:
    many = [image_bytes(make_image(n % 5, n)) for n in range(30)]
    words = {f"w{n}": np.random.default_rng(n).normal(size=6) for n in range(9)}
    for name, dim in (("said", 4), ("says", 6)):
        made = make_version(tmp_path / name, name, dim, seed=dim)
        version = add_text(made, {word: vector[:dim] for word, vector in words.items()})
        assert served.register(version).status_code == 201
    path = served.gallery("said")
    name = path.rpartition("/")[2]
    served.ingest(path, {f"i{n}": image for n, image in enumerate(many[:15])}, label="picture")
    texts = [{"id": f"t{n}", "text": f"w{n % 9} w{n % 7}", "metadata": {"label": "text"}} for n in range(15)]
    assert served.http.post(f"{path}/items", json={"items": texts}).json()["stored"] == 15
    asked = {"new": "says", "old": "said", "gallery": name, "label": "label"}

    told = problem(fit(served, **asked), 422, "too_few_pairs", "/gallery")["detail"]
    assert "--embed N" in told
    edge = fit(served, **asked, embed=25).json()

    assert (edge["made"]["held"], edge["made"]["embedded"], edge["support"]) == (0, 25, 20)
    again = fit(served, **asked, embed=1000, sample=28, replace=True).json()
    assert (again["made"]["embedded"], again["made"]["source"]) == (28, "items")
    held = served.http.get(f"{path}/items:embeddings", params={"versions": "says"}).json()["items"]
    assert [item["embeddings"] for item in held] == [[]] * 30  # nothing of it is stored
