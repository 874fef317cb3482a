"""index.encoders.decoding: threads that decode at the same time share one number of bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from index.encoders.decoding import Decoder, decoded_bytes
from index.encoders.image import load_image
from index.errors import InvalidImage

SMALL, LARGE = (8, 8), (40, 40)
ROOM = 3 * decoded_bytes(*SMALL)
SECONDS = 20.0


class Held:
    """What is decoded at this moment."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now: list[int] = []
        self.most = self.beside_large = 0
        self._lock = threading.Lock()

        def loading(image: Any) -> Any:
            with self._lock:
                self.now.append(decoded_bytes(*image.size))
                self.most = max(self.most, sum(self.now) if max(self.now) <= ROOM else 0)
                self.beside_large = max(self.beside_large, len(self.now) - 1 if max(self.now) > ROOM else 0)
            threading.Event().wait(0.002)
            return load_image(image)

        monkeypatch.setattr("index.encoders.decoding.load_image", loading)

    def leave(self, size: tuple[int, int]) -> None:
        with self._lock:
            self.now.remove(decoded_bytes(*size))


@pytest.fixture
def files(make_image: Callable[..., Any], image_bytes: Callable[..., bytes]) -> dict[tuple[int, int], bytes]:
    return {size: image_bytes(make_image(0, 1).resize(size)) for size in (SMALL, LARGE)}


def test_the_sum_never_exceeds_it_and_an_image_larger_than_all_of_it_is_alone(
    files: dict[tuple[int, int], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    held, decoder = Held(monkeypatch), Decoder(max_bytes=ROOM)

    def decode(size: tuple[int, int]) -> tuple[int, int]:
        with decoder.decoded(files[size]) as image:
            threading.Event().wait(0.002)
            held.leave(size)
            return image.size

    sizes = [LARGE if number % 6 == 5 else SMALL for number in range(36)]
    with ThreadPoolExecutor(12) as threads:
        assert list(threads.map(decode, sizes, timeout=SECONDS)) == sizes
    assert decoded_bytes(*SMALL) < held.most <= ROOM  # side by side, but not too many
    assert held.beside_large == 0


def test_what_fails_gives_its_room_back(files: dict[tuple[int, int], bytes]) -> None:
    decoder = Decoder(max_bytes=1)
    cut = files[LARGE][:-40]

    for _ in range(3):
        with pytest.raises(InvalidImage, match="corrupt or truncated"), decoder.decoded(cut):
            pass
        with pytest.raises(ZeroDivisionError), decoder.decoded(files[SMALL]):
            raise ZeroDivisionError
    with ThreadPoolExecutor(1) as threads:
        threads.submit(lambda: decoder.decoded(files[SMALL]).__enter__()).result(SECONDS)


def test_small_images_do_not_hold_up_a_large_one(files: dict[tuple[int, int], bytes]) -> None:
    """It asked before them; they fit beside what is held, and it does not."""
    decoder, order = Decoder(max_bytes=ROOM), list[str]()

    def decode(name: str, size: tuple[int, int]) -> None:
        with decoder.decoded(files[size]):
            order.append(name)

    with decoder.decoded(files[SMALL]):
        threads = [
            threading.Thread(target=decode, args=asked, daemon=True) for asked in (("large", LARGE), ("s", SMALL))
        ]
        for count, thread in enumerate(threads, 1):
            thread.start()
            while len(decoder._waiting) < count:
                threading.Event().wait(0.001)
    for thread in threads:
        thread.join(SECONDS)
    assert order == ["large", "s"]
