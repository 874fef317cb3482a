"""service.http.whole_answers: the head of an answer waits for its body, and for nothing else."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from service.http.whole_answers import PairedWrites


class Transport:
    """Notes what is done to it."""

    def __init__(self) -> None:
        self.done: list[Any] = []

    def write(self, data: bytes) -> None:
        self.done.append(data)

    def writelines(self, parts: tuple[bytes, ...]) -> None:
        self.done.append(b"+".join(parts))

    def close(self) -> None:
        self.done.append("closed")

    def is_closing(self) -> bool:
        return "closed" in self.done


@pytest.mark.parametrize(
    ("steps", "done"),
    [
        (["head", "body", "pass"], [b"head+body"]),
        (["head", "pass", "body", "pass"], [b"head", b"body"]),  # a stream whose first part comes later
        (["head", "body", "more", "pass"], [b"head+body", b"more"]),
        (["head", "body", "head", "body", "pass"], [b"head+body", b"head+body"]),
        (["head", "close", "pass"], [b"head", "closed"]),
        (["close"], ["closed"]),
    ],
)
def test_head_and_body_are_written_together_in_their_order_and_nothing_is_kept(
    steps: list[str], done: list[Any]
) -> None:
    async def run() -> list[Any]:
        transport = Transport()
        writes = PairedWrites(transport, asyncio.get_running_loop())
        for step in steps:
            if step == "pass":
                await asyncio.sleep(0)
            elif step == "close":
                writes.close()
            else:
                writes.write(step.encode())
        assert writes.is_closing() == ("close" in steps)
        return transport.done

    assert asyncio.run(run()) == done
