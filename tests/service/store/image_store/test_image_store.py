"""Whose store a place is: its marker, the store of another database, and one over the network that goes away."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from index.version import Version
from service.settings import Settings
from service.store.image_store.blobs import MARKER, Blobs, StoreUnreachable
from staging.api.served import problem, serving


class TestStoreOverTheNetwork:
    """Stores have exception types of their own, which are no OSError."""

    class NoConnection(Exception):
        pass

    def test_what_it_raises_is_an_outage(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        blobs = Blobs(f"memory://{tmp_path}", list, str)
        (key,) = blobs.write(1, [b"image"])

        def away(*_: Any, **__: Any) -> Any:
            raise self.NoConnection("no route")

        monkeypatch.setattr(MemoryFileSystem, "cat_file", away)
        monkeypatch.setattr(MemoryFileSystem, "pipe_file", away)
        for asks in (blobs.check, lambda: blobs.read(key), lambda: blobs.fetch(key), lambda: blobs.write(1, [b""])):
            with pytest.raises(StoreUnreachable, match=f"memory://{tmp_path} .*NoConnection: no route"):
                asks()
        assert "no route" in (blobs.problem or "")

        monkeypatch.undo()
        assert blobs.fetch(key) == b"image"
        assert blobs.problem is None


def test_a_database_leaves_the_folders_of_versions_in_the_store_of_another_one_alone(
    versions: dict[str, Version], tmp_path: Path
) -> None:
    """Their keys are hashes of their content: two databases with the same version have the same key."""
    first, second = (Settings(data=tmp_path / n, blobs_url=f"memory://{tmp_path}/{n}") for n in ("first", "second"))
    mistaken = second.model_copy(update={"blobs_url": first.blobs_url})
    with serving(first) as owner, serving(second) as another:
        assert owner.register(versions["v1"]).status_code == another.register(versions["v1"]).status_code == 201
        folders = dict(owner.runtime.blobs.all_folders()).keys()
    assert len(folders) == 1

    with serving(mistaken) as another:
        assert another.remove("/versions/v1").status_code == 204
        assert dict(another.runtime.blobs.all_folders()).keys() == folders
        refused = another.register(versions["v1"])

    assert "another database" in problem(refused, 503, "store_unreachable")["detail"]


@pytest.mark.parametrize("protocol", ["file", "memory"])
class TestMarker:
    @pytest.fixture
    def url(self, protocol: str, tmp_path: Path) -> str:
        return f"{protocol}://{tmp_path}/blobs"

    def test_a_fresh_place_becomes_the_store(self, url: str) -> None:
        Blobs(url, list, str).check()
        blobs = Blobs(url, lambda: ["1/of a row"], str)

        blobs.check()

        assert blobs.fetch("1/of a row") is None
        assert dict(blobs.all()) == {}

    def test_a_place_that_holds_none_of_the_images_is_not_the_store(self, url: str) -> None:
        blobs = Blobs(url, lambda: ["1/of a row"], str)
        for _ in range(2):
            with pytest.raises(StoreUnreachable, match=MARKER):
                blobs.check()
        with pytest.raises(StoreUnreachable):
            blobs.write(1, [b"x"])
        assert not blobs.exists(MARKER)

    def test_a_store_from_before_there_were_markers_is_known_by_an_image(self, url: str) -> None:
        first = Blobs(url, list, str)
        (key,) = first.write(1, [b"x"])
        first.remove([MARKER])

        Blobs(url, lambda: ["1/lost", key], str).check()

        assert first.exists(MARKER)

    def test_it_is_the_store_of_one_database_until_its_marker_is_emptied(self, url: str) -> None:
        ours, others = Blobs(url, list, lambda: "ours"), Blobs(url, lambda: ["1/lost"], lambda: "others")
        (key,) = ours.write(1, [b"x"])

        with pytest.raises(StoreUnreachable, match="another database"):
            others.write(1, [b"y"])
        with pytest.raises(StoreUnreachable, match="another database"):
            others.read("1/lost")
        others.remove_gallery(1)
        assert [name for name, _ in ours.all()] == [key]

        others._store.pipe_file(f"{url.partition('://')[2]}/{MARKER}", b"")
        others.check()
        with pytest.raises(StoreUnreachable, match="another database"):
            ours.check()

    def test_one_that_comes_back_between_two_looks_says_nothing_against_an_image(
        self, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        blobs = Blobs(url, list, str)
        (key,) = blobs.write(1, [b"x"])
        read, asked = Blobs._read, []

        def away_at_first(self: Blobs, wanted: str) -> bytes:
            asked.append(wanted)
            if len(asked) == 1:
                raise FileNotFoundError(wanted)
            return read(self, wanted)

        monkeypatch.setattr(Blobs, "_read", away_at_first)

        assert blobs.read(key) == b"x"
        assert asked == [key, MARKER, key]
