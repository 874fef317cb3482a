"""What tests of the command share: a service that answers what it is told to, and the command run in this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import httpx
import numpy as np
import pytest

from regraft import cli
from regraft.client import Client
from regraft.terminal import command as commands
from staging.api.answers import whole
from staging.external.fake_databases import FAKES
from staging.inputs.builders import make_image, make_version
from staging.logged import log_as_before


class Service:
    """Answers by "METHOD /path"; keeps what it was asked."""

    def __init__(self) -> None:
        self.answers: dict[str, object] = {}
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.answers[f"{request.method} {request.url.path}"]
        if isinstance(answer, list):
            answer = answer.pop(0)
        if isinstance(answer, httpx.Response):
            return answer
        return httpx.Response(200, json=whole(request, answer))


@pytest.fixture
def service(monkeypatch):
    made = Service()
    monkeypatch.setattr(commands, "Client", lambda url, key: Client(url, key, transport=httpx.MockTransport(made)))
    return made


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs `regraft ARGUMENTS` in this process; returns (exit code, standard output, standard error)."""
    monkeypatch.setattr(os, "nice", lambda _: 0)  # `worker` would slow every test down that this process runs then

    def command(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["regraft", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    # What a command sets is undone: its options as variables, and the log, which `serve` and `worker` set up.
    with patch.dict(os.environ), log_as_before():
        yield command


@pytest.fixture
def folder(tmp_path):
    for name in ("cats/1.png", "cats/2.PNG", "dogs/3.jpg", "dogs/notes.txt", "dogs/old/4.webp"):
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    return tmp_path / "images"


@pytest.fixture
def places(tmp_path):
    """What commands that need something on this machine are given."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "[bold]\x1b[2J.png").write_bytes(b"x")
    np.save(tmp_path / "v.npy", np.eye(2, dtype=np.float32))
    given = {"folder": tmp_path / "folder", "vectors": tmp_path / "v.npy"}
    return given | {"version": make_version(tmp_path / "v1", "v1", 2).folder}


@pytest.fixture
def image_set(tmp_path):
    """An arrays data set: 60 training images, 20 queries, 30 items."""
    arrays = {}
    for part, count, seed in (("train", 60, 0), ("query", 20, 1000), ("gallery", 30, 2000)):
        labels = np.arange(count) % 5
        arrays[f"{part}_labels"] = labels
        arrays[f"{part}_images"] = np.stack([np.asarray(make_image(int(c), seed + n)) for n, c in enumerate(labels)])
    np.savez(tmp_path / "images.npz", **arrays)
    return tmp_path / "images.npz"


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The clients of other databases are fakes, and `somewhere` is a folder that each takes for its own."""
    for place in (tmp_path / "somewhere", tmp_path / "below" / "somewhere"):
        place.mkdir(parents=True)
        for name in ("meta.json", "chroma.sqlite3"):
            (place / name).touch()
    monkeypatch.chdir(tmp_path)
    for kind, (module, fake) in FAKES.items():
        monkeypatch.setitem(sys.modules, module, fake)
        monkeypatch.delitem(sys.modules, f"regraft.sources.{kind}", raising=False)
    yield
    for kind in FAKES:
        sys.modules.pop(f"regraft.sources.{kind}", None)
