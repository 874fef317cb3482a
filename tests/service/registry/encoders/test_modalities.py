"""Encoders come into memory when they are needed and leave it when they are not."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.registry.encoders.modalities import ImageModality, Lazy, TextModality
from service.settings import Settings
from staging.api.served import serving
from staging.inputs.builders import add_text, make_version
from staging.waiting import until


class Thing:
    pass


def test_what_is_lazy_is_made_once_and_made_anew_after_it_was_dropped() -> None:
    lazy = Lazy(Thing)
    assert not lazy.loaded

    first = lazy.get()
    assert lazy.get() is first
    assert lazy.loaded
    lazy.drop(1000)
    assert lazy.get() is first

    lazy.drop(0)
    assert not lazy.loaded
    assert lazy.get() is not first


def test_a_holder_keeps_what_is_dropped_alive() -> None:
    lazy = Lazy(Thing)
    held = lazy.get()
    alive = weakref.ref(held)

    lazy.drop(0)
    assert alive() is held
    del held
    assert alive() is None


def test_a_touch_counts_as_a_use() -> None:
    lazy = Lazy(Thing)
    first = lazy.get()
    lazy._used -= 100
    lazy.touch()
    lazy.drop(50)

    assert lazy.get() is first


def test_what_cannot_be_made_is_tried_again() -> None:
    attempts = iter([ValueError("not yet"), None])

    def make() -> str:
        if error := next(attempts):
            raise error
        return "made"

    lazy = Lazy(make)
    with pytest.raises(ValueError, match="not yet"):
        lazy.get()
    assert not lazy.loaded
    assert lazy.get() == "made"


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server that forgets encoders almost at once."""
    with serving(Settings(data=tmp_path_factory.mktemp("hasty"), encoder_idle_seconds=0.2)) as running:
        yield running


def loaded(served: Any, version: str) -> list[str]:
    found: list[str] = served.http.get(f"/versions/{version}").json()["loaded"]
    return found


def test_the_old_encoder_is_there_while_a_shard_needs_it(hasty: Any, tmp_path: Path, pictures: list[bytes]) -> None:
    for name, seed in (("old", 0), ("new", 5)):  # no edge: new reaches old by `dual` only
        assert hasty.register(make_version(tmp_path / name, name, 4, seed=seed)).status_code == 201
    assert (loaded(hasty, "old"), loaded(hasty, "new")) == ([], [])
    path = hasty.gallery("old")
    hasty.ingest(path, {"a": pictures[0], "b": pictures[1]})
    assert loaded(hasty, "old") == ["images"]

    hasty.http.post(f"{path}/deployments", json={"version": "new"})
    hasty.ingest(path, {"c": pictures[2]})
    answer = hasty.query(path, pictures[0], k=3).json()

    assert {m["id"]: m["route"] for m in answer["results"][0]["matches"]} == {"a": ["dual"], "b": ["dual"], "c": []}
    looks = hasty.runtime.settings.encoder_idle_seconds * 3
    time.sleep(looks)  # long enough to be forgotten, were it not needed
    assert (loaded(hasty, "old"), loaded(hasty, "new")) == (["images"], ["images"])

    hasty.http.post(f"{path}/items:delete", json={"ids": ["a", "b"]})
    until(lambda: loaded(hasty, "old") == [])
    assert loaded(hasty, "new") == ["images"]
    hasty.ingest(path, {"d": pictures[3]})
    assert hasty.query(path, pictures[3], k=1).json()["results"][0]["matches"][0]["id"] == "d"
    assert hasty.remove(path).status_code == 204
    until(lambda: loaded(hasty, "new") == [])


def test_an_encoder_that_was_forgotten_comes_back(hasty: Any, tmp_path: Path, pictures: list[bytes]) -> None:
    assert hasty.register(make_version(tmp_path / "back", "back", 4)).status_code == 201
    path = hasty.gallery("back")
    hasty.ingest(path, {"a": pictures[0]})
    registered = hasty.runtime.registry.named("back")
    held = registered.encoder()
    registered._lazy["images"].drop(0)
    assert loaded(hasty, "back") == []

    assert held.card.name == "back"
    assert hasty.query(path, pictures[0], k=1).status_code == 200
    assert loaded(hasty, "back") == ["images"]


def test_an_encoder_uses_the_threads_of_the_settings(tmp_path: Path) -> None:
    version = add_text(make_version(tmp_path / "v", "v", 2), {"east": np.eye(2)[0]})
    settings = Settings(encoder_threads=3)

    for model in (ImageModality(version, settings).encoder._encoder, TextModality(version, settings).encoder._model):
        assert model.session.get_session_options().intra_op_num_threads == 3
