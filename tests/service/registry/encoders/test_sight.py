"""Images much larger than what a version reads: the answers say so, and nothing else changes."""

from __future__ import annotations

import io
from typing import Any

import pytest
from PIL import Image

CODE = "image_mostly_unseen"


def enlarged(picture: bytes) -> bytes:
    """The picture, 40 x 40 pixels: the versions of these tests read the centre 8 x 8."""
    stream = io.BytesIO()
    Image.open(io.BytesIO(picture)).resize((40, 40)).save(stream, "PNG")
    return stream.getvalue()


def said(answer: dict[str, Any]) -> list[tuple[str, str, int, str]]:
    return [(w["code"], w["version"], w["count"], w["pointer"]) for w in answer["warnings"]]


def test_ingest_counts_the_images_that_a_version_hardly_sees(served: Any, pictures: list[bytes]) -> None:
    images = {"small": pictures[0], "a": enlarged(pictures[1]), "b": enlarged(pictures[2]), "bad": b"no image"}

    done = served.ingest(served.gallery(), images).json()

    assert (done["stored"], done["failed"]) == (3, 1)
    assert said(done) == [(CODE, "v1", 2, "/items/1/image")]
    assert "40 x 40" in done["warnings"][0]["detail"]


def test_a_query_says_so_for_each_version_that_embedded_it(served: Any, pictures: list[bytes]) -> None:
    path = served.gallery("v2")
    assert said(served.ingest(path, {"a": pictures[0]}).json()) == []

    assert said(served.query(path, pictures[0], k=1).json()) == []
    asked = served.query(path, pictures[0], enlarged(pictures[1]), k=1).json()

    assert said(asked) == [(CODE, "v2", 1, "/images/1")]


def test_what_holds_no_image_loses_nothing(served: Any) -> None:
    path = served.gallery("plain")
    items = [{"id": "a", "embedding": [1.0, 2.0, 3.0]}]

    assert said(served.http.post(f"{path}/items", json={"items": items}).json()) == []
    body = {"version": "plain", "embeddings": [[1.0, 2.0, 3.0]], "k": 1}
    assert said(served.http.post(f"{path}/query", json=body).json()) == []


@pytest.mark.parametrize("size", [(1, 40), (40, 1)])
def test_an_image_that_is_refused_is_not_warned_of(served: Any, size: tuple[int, int]) -> None:
    stream = io.BytesIO()
    Image.new("L", size).save(stream, "PNG")

    refused = served.ingest(served.gallery(), {"a": stream.getvalue()})

    assert refused.status_code == 422
    assert "warnings" not in refused.json()
