"""The command line against the real service and its worker: store, upgrade, backfill, roll back, stop."""

from __future__ import annotations

import ast
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from regraft import Client, Problem, Unreachable
from staging.inputs.builders import image_bytes, make_image, make_version
from staging.processes.forked import Forked, environment, run
from staging.processes.ports import free_port
from staging.waiting import until

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()
LABELS = ("ant", "bee", "cat")


class Running:
    """`regraft serve --workers 1` on a free port, and `regraft` commands against it."""

    def __init__(self, folder: Path) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / "serve.log"
        self.folder, self.environment = folder, environment(REGRAFT_URL=self.url, NO_COLOR="1")
        options = ["--port", port, "--data", folder / "data"]
        self.process = Forked(["-m", "regraft", "serve", *options], self.environment, self.log)
        try:
            self.wait(self.is_ready)
        except BaseException:
            # Nobody else knows the process yet.
            self.process.kill()
            self.process.wait()
            raise

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            with Client(self.url) as client:
                return client.ready().status == "ready"
        except (Unreachable, Problem):
            return False

    def wait(self, holds, seconds: float = 90.0) -> None:
        until(holds, seconds=seconds, said=self.log.read_text)

    def regraft(self, *arguments: object, code: int = 0) -> str:
        ended, out, err = run(["-m", "regraft", *arguments], self.environment, self.folder)
        assert ended == code, out + err
        assert "Traceback" not in err
        return out + (err if code else "")

    def logged(self, words: str) -> bool:
        return words in self.log.read_text()


@pytest.fixture
def running(tmp_path):
    made = Running(tmp_path)
    yield made
    made.process.kill()
    made.process.wait()
    # The worker is a process of its own; it must not outlive the test.
    made.wait(lambda: made.logged("worker_stopped"))


@pytest.fixture
def images(tmp_path):
    for number, label in enumerate(LABELS):
        (tmp_path / "images" / label).mkdir(parents=True)
        for seed in range(4):
            (tmp_path / "images" / label / f"{seed}.png").write_bytes(image_bytes(make_image(number, seed)))
    (tmp_path / "query.png").write_bytes(image_bytes(make_image(1, 9)))
    return tmp_path / "images"


def test_a_gallery_is_filled_upgraded_backfilled_and_rolled_back(running, images, tmp_path):
    v1 = make_version(tmp_path / "v1", "v1", 4)
    v2 = make_version(tmp_path / "v2", "v2", 6, edges=[(v1, "truncate")])
    query = tmp_path / "query.png"

    assert running.regraft("gallery", "create", "zoo") == "created gallery zoo\n"
    assert "zoo has no current version" in running.regraft("ingest", "zoo", images, code=1).replace("'", "")
    running.regraft("version", "register", v1.folder)
    running.regraft("deploy", "zoo", "v1")
    assert running.regraft("ingest", "zoo", images) == "stored 12 images in zoo, 0 failed (12 new, 0 replaced)\n"
    old = running.regraft("query", "zoo", query, "-k", 4)
    assert [line.split("/")[0] for line in old.splitlines()[1:]] == ["bee"] * 4

    running.regraft("version", "register", v2.folder)
    assert "verdict" in running.regraft("gate", "zoo", "v2")
    running.regraft("deploy", "zoo", "v2")
    mixed = running.regraft("query", "zoo", query, "-k", 4)
    assert [line.split()[2:4] for line in mixed.splitlines()[1:]] == [["v1", "truncate"]] * 4

    assert "is done (12 done" in running.regraft("backfill", "start", "zoo", "--watch")
    assert "12 items (v2: 12)" in running.regraft("gallery", "show", "zoo")
    new = running.regraft("query", "zoo", query, "-k", 4)
    assert [line.split()[2:4] for line in new.splitlines()[1:]] == [["v2", "same"]] * 4

    assert running.regraft("rollback", "zoo") == "zoo: v2 -> v1, 12 items switched to stored embeddings\n"
    assert running.regraft("query", "zoo", query, "-k", 4) == old
    assert running.regraft("deploy", "zoo", "v2") == "zoo: v1 -> v2, 12 items switched to stored embeddings\n"
    assert running.regraft("query", "zoo", query, "-k", 4) == new

    assert running.regraft("rollback", "nowhere", code=1).startswith("regraft: gallery 'nowhere' does not exist")


@pytest.fixture
def photos(tmp_path):
    """Six views of each of two photographs as JPEG files, in a folder for each; and one more view."""
    from sklearn.datasets import load_sample_images

    places = np.random.default_rng(0).integers(0, 200, size=(2, 7, 2))
    for name, pixels, corners in zip("ab", load_sample_images().images, places, strict=True):
        (tmp_path / "my-photos" / name).mkdir(parents=True)
        for number, (top, left) in enumerate(corners):
            view = Image.fromarray(pixels[top : top + 220, left : left + 400])
            view.save(tmp_path / ("some-photo.jpg" if number == 6 else f"my-photos/{name}/{number}.jpg"))
    return tmp_path


def readme_blocks() -> list[str]:
    """What stands under "Use it": the service, the commands, Python, and vectors that are there already."""
    steps = README.split("## Use it")[1].split("\n## ")[0]
    return re.findall(r"^```(?:python)?\n(.*?)^```", steps, re.DOTALL | re.MULTILINE)


def pasted(running: Running, shell: str) -> list[str]:
    return [
        running.regraft(*shlex.split(line, comments=True)[1:])
        for line in shell.splitlines()
        if line.startswith("regraft ")
    ]


def test_the_readme_can_be_pasted(running, photos):
    _, shell, python, _ = readme_blocks()
    for name in ("my-photos", "some-photo.jpg"):
        shell, python = (text.replace(name, str(photos / name)) for text in (shell, python))
    said = pasted(running, shell)

    assert len(said) == 10
    assert "stored 12 images in photos, 0 failed" in said[3]
    assert said[4].splitlines()[1].startswith("b/")
    assert "12 done" in said[8]

    code = python.replace("http://127.0.0.1:8080", running.url)
    printed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    matches = ast.literal_eval(printed)
    assert [Path(match).parent.name for match, _ in matches] == ["a"] * 3
    assert matches[0][1] == pytest.approx(1.0)


def test_the_readme_brings_vectors_that_are_there_already(running, tmp_path):
    shell = readme_blocks()[3].replace("create clip-v1", f"create clip-v1 --into {tmp_path}")
    shell = shell.replace("register clip-v1", f"register {tmp_path / 'clip-v1'}")
    for name in ("items.parquet", "query.npy"):
        shell = shell.replace(name, str(tmp_path / name))
    vectors = np.random.default_rng(0).normal(size=(6, 512)).astype(np.float32)
    cities = ["Bern", "Chur"] * 3
    items = {"id": [f"i{n}" for n in range(6)], "embedding": vectors.tolist(), "city": cities}
    pq.write_table(pa.table(items), tmp_path / "items.parquet")
    np.save(tmp_path / "query.npy", vectors[1])

    said = pasted(running, shell)

    assert len(said) == 6
    assert sorted(line.split()[0] for line in said[-1].splitlines()[1:]) == ["i0", "i2", "i4"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_service_and_its_worker_in_order(running, number):
    running.wait(lambda: running.logged("worker_started"))

    running.process.send_signal(number)

    assert running.process.wait(20) == 0
    assert running.logged("worker_stopped")
    assert running.logged("Application shutdown complete")
    assert not running.logged("Traceback")
    assert not running.logged("Fatal Python error")


def test_a_worker_does_not_outlive_a_service_that_was_killed(running):
    running.wait(lambda: running.logged("worker_started"))

    running.process.kill()

    running.wait(lambda: running.logged("worker_stopped"), 10)
