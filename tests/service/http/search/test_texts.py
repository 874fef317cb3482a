"""Queries by text: embedded by the current version's text entrance, answered as images are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from index.encoders.encoder import Encoder
from index.encoders.image import decode_image
from index.encoders.text import MAX_CHARACTERS, TextEncoder
from index.version import Version
from staging.api.served import problem
from staging.inputs.builders import add_text, make_version


@pytest.fixture(scope="module")
def speaking(served: Any, tmp_path_factory: pytest.TempPathFactory, pictures: list[bytes]) -> Version:
    """A version whose words `class0` ... `class4` are where the first picture of the class is."""
    made = make_version(tmp_path_factory.mktemp("text") / "spoken", "spoken", 4)
    vectors = Encoder(made).encode([decode_image(picture) for picture in pictures[:5]]).vectors
    version = add_text(made, {f"class{n}": vector for n, vector in enumerate(vectors)})
    assert served.register(version).status_code == 201
    return version


@pytest.fixture(scope="module")
def filled(served: Any, speaking: Version, pictures: list[bytes]) -> str:
    return served.filled(pictures, "spoken")


def ask(served: Any, path: str, *texts: Any, **fields: Any) -> Any:
    return served.http.post(f"{path}/query", json={"texts": list(texts), **fields})


def test_texts_find_the_items_whose_images_they_describe(
    served: Any, filled: str, speaking: Version, pictures: list[bytes]
) -> None:
    texts = ["class3", "class1 class1 class4", "something else"]
    items = Encoder(speaking).encode([decode_image(picture) for picture in pictures]).vectors
    scores = TextEncoder(speaking).encode(texts) @ items.T

    answer = ask(served, filled, *texts, k=20).json()

    assert answer["version"] == "spoken"
    for result, expected in zip(answer["results"], scores, strict=True):
        assert [m["id"] for m in result["matches"]] == [f"i{n}" for n in np.argsort(-expected, kind="stable")]
        assert [m["score"] for m in result["matches"]] == pytest.approx(sorted(expected, reverse=True), abs=1e-5)
    assert answer["results"][0]["matches"][0]["id"] == "i3"


def test_a_version_tells_whether_it_reads_texts(served: Any, filled: str) -> None:
    ask(served, filled, "class0", k=1)

    spoken = served.http.get("/versions/spoken").json()
    assert spoken["text"]
    assert spoken["loaded"] == ["images", "texts"]
    assert not served.http.get("/versions/v1").json()["text"]


def test_an_empty_gallery_answers_texts_that_nothing_matches(served: Any, filled: str) -> None:
    path = served.gallery("spoken")

    assert [result["matches"] for result in ask(served, path, "class1", "class2").json()["results"]] == [[], []]
    problem(ask(served, path, ""), 422, "invalid_text", "/texts/0")
    problem(ask(served, served.gallery("v1"), "class1"), 422, "no_text_entrance")


def test_many_texts_are_answered_in_their_order(served: Any, filled: str) -> None:
    results = ask(served, filled, *[f"class{n % 5}" for n in range(90)], k=1).json()["results"]

    assert [r["matches"][0]["id"] for r in results] == [f"i{n % 5}" for n in range(90)]


@pytest.mark.parametrize(
    ("texts", "code", "pointer"),
    [
        ([], "invalid_body", "/texts"),
        (None, "invalid_body", "/texts"),
        ("class1", "invalid_body", "/texts"),
        (["class1", ""], "invalid_text", "/texts/1"),
        (["  "], "invalid_text", "/texts/0"),
        ([3], "invalid_body", "/texts/0"),
        (["x" * (MAX_CHARACTERS + 1)], "invalid_text", "/texts/0"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_bad_text_is_named(served: Any, filled: str, texts: Any, code: str, pointer: str) -> None:
    problem(served.http.post(f"{filled}/query", json={"texts": texts, "k": 1}), 422, code, pointer)


def test_half_a_surrogate_pair_is_no_text(served: Any, filled: str) -> None:
    headers = {"content-type": "application/json"}
    body = '{"texts": ["class1", "\\ud800"], "k": 1}'

    problem(served.http.post(f"{filled}/query", content=body, headers=headers), 422, "invalid_body", "/texts/1")


def test_there_is_a_largest_number_of_texts(served: Any, filled: str) -> None:
    problem(ask(served, filled, *["class1"] * 101, k=1), 413, "body_too_large", "/texts")


def test_a_version_with_texts_alone_names_nothing(served: Any, filled: str) -> None:
    problem(ask(served, filled, "class1", version="spoken"), 422, "invalid_body", "/version")


@pytest.mark.parametrize("version", ["v1", "plain"])
def test_a_version_that_reads_no_texts_says_which_do(served: Any, filled: str, version: str) -> None:
    path = served.gallery(version)
    dim = {"v1": 4, "plain": 3}[version]
    items = [{"id": "a", "embedding": [1.0] * dim}]
    assert served.http.post(f"{path}/items", json={"items": items}).status_code == 200

    told = problem(ask(served, path, "class1", k=1), 422, "no_text_entrance", "/texts")["detail"]

    assert repr(version) in told
    assert "spoken" in told


def test_a_deployment_says_that_no_more_texts_are_read(
    served: Any, filled: str, tmp_path: Path, pictures: list[bytes]
) -> None:
    """Queries by texts go on while the older version serves all items, and end with the first one that moves."""
    path = served.gallery("spoken")
    served.ingest(path, {"a": pictures[1], "b": pictures[2]})

    told = served.http.post(f"{path}/deployments", json={"version": "v1"}).json()["notes"]

    lost = [note for note in told if note.startswith("'v1' does not embed texts, as 'spoken' does")]
    assert len(lost) == 1
    assert ask(served, path, "class1", k=1).status_code == 200
    served.ingest(path, {"b": pictures[2]})
    problem(ask(served, path, "class1", k=1), 422, "no_text_entrance", "/texts")
    back = served.http.post(f"{path}/deployments", json={"version": "spoken"}).json()["notes"]
    assert not [note for note in back if "does not embed" in note]


def test_old_items_are_reached_by_the_old_text_entrance_or_reported(
    served: Any, speaking: Version, tmp_path: Path, pictures: list[bytes]
) -> None:
    other = make_version(tmp_path / "other", "other", 4, seed=9)
    vector = Encoder(other).encode([decode_image(pictures[2])]).vectors[0]
    assert served.register(add_text(other, {"class2": vector})).status_code == 201
    path = served.gallery("spoken")
    served.ingest(path, {"spoken": pictures[2]})
    served.http.post(f"{path}/deployments", json={"version": "v1"})
    served.ingest(path, {"silent": pictures[2]})
    served.deploy(path, "other")
    served.ingest(path, {"other": pictures[2]})

    answer = ask(served, path, "class2", k=3).json()

    routes = {m["id"]: (m["version"], m["route"]) for m in answer["results"][0]["matches"]}
    assert routes == {"other": ("other", []), "spoken": ("spoken", ["dual"])}
    assert [(d["version"], d["items"]) for d in answer["degraded"]] == [("v1", 1)]


def test_a_folder_with_a_wrong_text_entrance_is_not_registered(served: Any, tmp_path: Path) -> None:
    version = add_text(make_version(tmp_path / "mute", "mute", 4), {"east": np.array([0, 0, 0, 1])}, limit=513)

    problem(served.register(version), 422, "invalid_version_folder", "/text/tokenizer.json")
    assert served.http.get("/versions/mute").status_code == 404


def test_versions_with_nothing_but_a_text_entrance_reach_older_items_by_it(served: Any, tmp_path: Path) -> None:
    for name in ("words1", "words2"):
        made = make_version(tmp_path / name, name, 4, encoder=False)
        assert served.register(add_text(made, {"class0": np.eye(1, 4, dtype=np.float32)[0]})).status_code == 201
    path = served.gallery("words1")
    items = [{"id": f"e{n}", "embedding": np.eye(4)[n].tolist()} for n in range(2)]
    assert served.http.post(f"{path}/items", json={"items": items}).json()["stored"] == 2

    served.deploy(path, "words2")
    late = {"version": "words1", "items": [{"id": "e2", "embedding": [0, 0, 1, 0]}]}
    assert served.http.post(f"{path}/items", json=late).status_code == 200

    answer = ask(served, path, "class0", k=3).json()
    assert (answer["version"], answer["degraded"]) == ("words2", [])
    assert [m["route"] for m in answer["results"][0]["matches"]] == [["dual"]] * 3
    assert answer["results"][0]["matches"][0]["id"] == "e0"
