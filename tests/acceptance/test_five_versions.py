"""One gallery whose items five versions embedded, asked once: one list, explained, equal to brute force.

BCT, OCA and FCT versions of the examples over their old one, and an unrelated version - a random projection of the
pixels - that reaches them along Procrustes edges which the service fits on items that hold both embeddings.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

from examples.demo.processes import Processes
from index.edges.transform import load_forward
from index.encoders.encoder import Encoder
from index.encoders.image import decode_image
from index.version import Version
from index.version_folder.folder import load_version
from regraft import Client
from regraft.client import ImageItem
from regraft.models import BackfillInfo, EdgeUsed, SearchResponse
from staging.inputs.builders import image_bytes, make_version

EXAMPLES = Path(__file__).parents[2] / "examples"
OLD, BCT, OCA, FCT, OTHER = "v1", "v2-bct", "v2-oca", "v2-fct", "projection"
EACH = 24
"""Items in each batch."""
BATCHES = {"moved": OLD, "fct": FCT, "old": OLD, "bct": BCT, "oca": OCA, "other": OTHER}
"""Batch -> the version its items were encoded by, in order; FCT's transform then moves the first one."""


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Version]:
    known = {name: load_version(EXAMPLES / name) for name in (OLD, BCT, OCA, FCT)}
    return {**known, OTHER: make_version(tmp_path_factory.mktemp("other") / OTHER, OTHER, 24)}


@pytest.fixture(scope="module")
def digits() -> list[tuple[bytes, int]]:
    """Real digits, in a fixed order: (image file, digit)."""
    from sklearn.datasets import load_digits

    drawn = load_digits()
    order = np.random.default_rng(0).permutation(len(drawn.target))[:400]
    pixels = (drawn.images[order] * 255 / 16).astype(np.uint8)
    return [(image_bytes(Image.fromarray(p)), int(t)) for p, t in zip(pixels, drawn.target[order], strict=True)]


@dataclass(frozen=True)
class Site:
    """A running service, and what its gallery `mixed` must hold: item -> (version it is active in, embedding)."""

    client: Client
    http: httpx.Client
    data: Path
    stored: Mapping[str, tuple[str, np.ndarray]]

    def reach(self, query: np.ndarray, route: Sequence[EdgeUsed]) -> np.ndarray:
        """A query of the unrelated version along a route, by the definitions of its edges."""
        for edge in route:
            if edge.kind == "matrix":
                place = self.data / "edges" / edge.new / edge.old / "matrix"
                arrays = np.load(next(place.rglob("edge.npz")))
                query = unit(query @ arrays["weight"].astype(float) + arrays["bias"])
            if edge.kind == "truncate":
                query = unit(query[:, :16])
        return query


@pytest.fixture(scope="module")
def site(
    tmp_path_factory: pytest.TempPathFactory, versions: dict[str, Version], digits: list[tuple[bytes, int]]
) -> Iterator[Site]:
    """Gallery `pairs`, whose items hold an embedding by every version, edges fitted on it, and gallery `mixed`."""
    with (
        Processes(tmp_path_factory.mktemp("service")) as running,
        running.client() as client,
        httpx.Client(
            base_url=f"{running.url}/v1", timeout=60, headers={"Authorization": f"Bearer {running.api_key}"}
        ) as http,
    ):
        for version in versions.values():
            client.register_version(version.folder)
        client.create_gallery("pairs")
        client.deploy("pairs", OLD)
        store(client, "pairs", "pair", digits[200:])
        for name in (BCT, OCA, FCT, OTHER):
            client.deploy("pairs", name)
            finish(client, client.start_backfill("pairs"))
        for old in (BCT, OCA, FCT):
            # By classes an edge measures better than by single images, and the best route decides which of an item's
            # embeddings counts: this one's keeps the moved items in FCT's space.
            label = {"label": "digit"} if old == FCT else {}
            asked = {"new": OTHER, "old": old, "kind": "procrustes", "gallery": "pairs", **label}
            answer = http.post("/edges:fit", json=asked)
            assert answer.status_code == 201, answer.text
        client.create_gallery("mixed")
        for number, (batch, name) in enumerate(BATCHES.items()):
            client.deploy("mixed", name)
            if batch == "fct":
                finish(client, client.start_backfill("mixed", kind="transform"))
            store(client, "mixed", batch, digits[number * EACH : (number + 1) * EACH])
        yield Site(client, http, running.data, embedded(versions, digits))


def store(client: Client, gallery: str, batch: str, some: Sequence[tuple[bytes, int]]) -> None:
    items = [ImageItem(f"{batch}-{n}", image, {"digit": digit}) for n, (image, digit) in enumerate(some)]
    assert client.ingest(gallery, items).failed == 0


def finish(client: Client, backfill: BackfillInfo) -> None:
    deadline = time.monotonic() + 60
    while client.backfill(backfill.id).state == "running":
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert client.backfill(backfill.id).failed == 0


def embedded(versions: dict[str, Version], digits: list[tuple[bytes, int]]) -> dict[str, tuple[str, np.ndarray]]:
    stored = {}
    for number, (batch, name) in enumerate(BATCHES.items()):
        images = [decode_image(image) for image, _ in digits[number * EACH : (number + 1) * EACH]]
        vectors = Encoder(versions[name]).encode(images).vectors
        if batch == "moved":
            forward = next(edge for edge in versions[FCT].edges if edge.old == OLD)
            vectors = load_forward(forward, versions[FCT].card, versions[OLD].card)(vectors)
        active = FCT if batch == "moved" else name
        stored.update({f"{batch}-{n}": (active, vector.astype(float)) for n, vector in enumerate(vectors)})
    return stored


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def check(site: Site, query: np.ndarray, answer: SearchResponse, reached: set[str]) -> None:
    """The list holds every item of the reached versions once, in the order of their cosines along the routes told."""
    shards = {shard.version: shard for shard in answer.explain.shards}
    assert set(shards) == reached
    asked = {version: site.reach(query, shard.route)[0] for version, shard in shards.items()}
    expected = {key: asked[v] @ vector for key, (v, vector) in site.stored.items() if v in reached}
    matches = answer.results[0].matches
    assert sorted(match.id for match in matches) == sorted(expected)
    np.testing.assert_allclose([m.raw_score for m in matches], sorted(expected.values())[::-1], atol=2e-5)
    np.testing.assert_allclose([m.raw_score for m in matches], [expected[m.id] for m in matches], atol=2e-5)


def test_one_query_over_five_versions_is_one_list(
    site: Site, versions: dict[str, Version], digits: list[tuple[bytes, int]]
) -> None:
    image = digits[-1][0]
    query = Encoder(versions[OTHER]).encode([decode_image(image)]).vectors.astype(float)

    answer = site.client.query("mixed", [image], len(site.stored), explain=True)

    check(site, query, answer, {OLD, BCT, OCA, FCT, OTHER})
    assert (answer.version, answer.degraded) == (OTHER, [])
    assert answer.mix == {OLD: EACH, BCT: EACH, OCA: EACH, FCT: 2 * EACH, OTHER: EACH}
    told = {(s.version, s.origin): s for s in answer.explain.shards}
    assert told[FCT, "transformed"].items == told[FCT, "encoded"].items == EACH
    assert told[OTHER, "encoded"].route == []
    for old in (BCT, OCA, FCT):
        (edge,) = told[old, "encoded"].route
        assert (edge.kind, edge.scores.keys() >= {"cmc@1"}) == ("matrix", True)
    assert [edge.kind for edge in told[OLD, "encoded"].route] in (["matrix", "identity"], ["matrix", "truncate"])
    asked = digits[-40:]
    results = site.client.query("mixed", [image for image, _ in asked], 10).results
    right = [m.metadata["digit"] == digit for r, (_, digit) in zip(results, asked, strict=True) for m in r.matches]
    assert np.mean(right) > 0.3, np.mean(right)  # a tenth by chance


def test_without_an_edge_the_answer_is_degraded_and_never_wrong(
    site: Site, versions: dict[str, Version], digits: list[tuple[bytes, int]]
) -> None:
    query = Encoder(versions[OTHER]).encode([decode_image(digits[-2][0])]).vectors
    ask = {"embeddings": query.tolist(), "version": OTHER, "k": len(site.stored), "explain": True}
    whole = site.client.query_embeddings("mixed", query, OTHER, len(site.stored), explain=True)
    check(site, query.astype(float), whole, {OLD, BCT, OCA, FCT, OTHER})

    gone = {"confirm": "matrix", "force": True, "reason": "acceptance test"}
    assert site.http.delete(f"/edges/{OTHER}/{FCT}/matrix", params=gone).status_code == 200

    # Items that FCT moved still hold what v1 made of them, and are found by that.
    moved = Encoder(versions[OLD]).encode([decode_image(image) for image, _ in digits[:EACH]]).vectors
    back = {f"moved-{n}": (OLD, vector.astype(float)) for n, vector in enumerate(moved)}
    answer = site.client.query_embeddings("mixed", query, OTHER, len(site.stored), explain=True)
    check(replace(site, stored={**site.stored, **back}), query.astype(float), answer, {OLD, BCT, OCA, OTHER})
    assert [(d.version, d.items) for d in answer.degraded] == [(FCT, EACH)]
    assert site.http.post("/galleries/mixed/query", json={**ask, "strict": True}).status_code == 409
    # An image can still ask the version's own encoder.
    by_image = site.client.query("mixed", [digits[-2][0]], len(site.stored))
    assert {tuple(m.route) for m in by_image.results[0].matches if m.version == FCT} == {("dual",)}
