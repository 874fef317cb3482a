"""`Provider`: a fake embedding API that can misbehave like real ones."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

DIM = 6
Answer = Callable[[dict[str, Any], list[dict[str, Any]]], Any]
"""(body of the request, rows of a correct answer) -> the answer instead, or a tuple (status, headers, body)."""


def embedding(text: str, dim: int = DIM, model: str = "m") -> np.ndarray:
    """The embedding of a text, by its words, so that similar texts are near each other."""
    seeds = [int.from_bytes(hashlib.sha256(f"{model} {word}".encode()).digest()[:4]) for word in text.split() or [""]]
    total = np.sum([np.random.default_rng(seed).normal(size=dim) for seed in seeds], axis=0)
    unit: np.ndarray = (total / np.linalg.norm(total)).astype(np.float32)
    return unit


@dataclass
class Provider:
    """A running API. `script`: the next answers, one per request; `requests`: the received requests."""

    url: str = ""
    key: str = "secret-key-of-the-provider"
    script: list[Answer] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    always: Answer | None = None

    @property
    def inputs(self) -> list[str]:
        """All texts received."""
        return [text for request in self.requests for text in request["input"]]

    def answer(self, body: dict[str, Any], authorization: str) -> tuple[int, dict[str, str], bytes]:
        self.requests.append(body)
        if authorization != f"Bearer {self.key}":
            return 401, {}, json.dumps({"error": f"Incorrect API key provided: {authorization}"}).encode()
        rows = [self._row(body, n, text) for n, text in enumerate(body["input"])]
        wrong = self.script.pop(0) if self.script else self.always
        made = None if wrong is None else wrong(body, rows)
        if isinstance(made, tuple):
            status, headers, content = made
            return status, headers, content if isinstance(content, bytes) else json.dumps(content).encode()
        usage = {"total_tokens": sum(len(text.split()) for text in body["input"])}
        return 200, {}, json.dumps({"data": rows if made is None else made, "usage": usage}).encode()

    def _row(self, body: dict[str, Any], number: int, text: str) -> dict[str, Any]:
        vector = embedding(text, body.get("dimensions", DIM), body["model"])
        coded = base64.b64encode(vector.tobytes()).decode() if body["encoding_format"] == "base64" else vector.tolist()
        return {"object": "embedding", "index": number, "embedding": coded}


@contextmanager
def providing() -> Iterator[Provider]:
    """Run one on a free port."""
    provider = Provider()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if self.path == "/v1/embeddings":
                status, headers, content = provider.answer(body, self.headers.get("authorization", ""))
            else:
                status, headers, content = 404, {}, b"{}"
            self.send_response(status)
            for name, value in {**headers, "content-length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            with suppress(OSError):  # the client is gone
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    provider.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield provider
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def fails(status: int, **headers: str) -> Answer:
    """An answer with this status."""
    told = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda body, rows: (status, told, {"error": {"message": "no " * 100}})


def slow(seconds: float) -> Answer:
    """A correct answer, delayed."""

    def wait(body: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        time.sleep(seconds)

    return wait
