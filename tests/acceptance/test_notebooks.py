"""Each notebook under examples/notebooks, cell by cell, with small models in the place of those it names."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service.settings import Settings
from staging.api.served import serving
from staging.inputs.builders import make_image
from staging.inputs.embedding_models import TEXTS, TextModel
from staging.shortcuts import migrated_once, verified_here

NOTEBOOKS = Path(__file__).parent.parent.parent / "examples/notebooks"


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """A service with a worker."""
    ended = threading.Event()
    with verified_here(), migrated_once(), serving(Settings(data=tmp_path / "data")) as running:

        def work() -> None:
            while not ended.wait(0.05):
                running.work()

        worker = threading.Thread(target=work)
        worker.start()
        yield running.url
        ended.set()
        worker.join()


@pytest.fixture
def names(tmp_path: Path, url: str) -> dict[str, Any]:
    """What every notebook names."""
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    for number in range(60):
        path = tmp_path / "photos" / f"class{number % 5}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        make_image(number % 5, number).save(path)
    here = {
        "PHOTOS": str(tmp_path / "photos"),
        "TEXTS": str(tmp_path / "texts.txt"),
        "VERSIONS": str(tmp_path / "made"),
    }
    return here | {"SERVICE": url, "GALLERY": "g", "SAMPLE": 40, "TEXT": "a cat", "QUESTION": TEXTS[-1]}


def run(notebook: str, names: dict[str, Any]) -> dict[str, int]:
    """Run every cell but the one that names models, with `names` in its place; returns the gallery's mix at the end."""
    cells = [c for c in json.loads((NOTEBOOKS / notebook).read_text())["cells"] if c["cell_type"] == "code"]
    named = [c for c in cells if "names" in c["metadata"].get("tags", ())]
    assert len(named) == 1
    assert cells[0] == named[0]
    found = dict(names)
    try:
        for number, cell in enumerate(cells[1:], 2):
            exec(compile("".join(cell["source"]), f"{notebook}, cell {number}", "exec"), found)
        return dict(found["client"].gallery(names["GALLERY"]).mix)
    finally:
        if "client" in found:
            found["client"].close()


@pytest.fixture
def folders(tmp_path: Path) -> Any:
    hugging_face = pytest.importorskip("staging.inputs.hugging_face", reason="regraft[models] is not installed")
    words = hugging_face.words()
    return lambda *kinds: [str(getattr(hugging_face, kind)(tmp_path / kind, words)) for kind in kinds]


@pytest.mark.slow
def test_clip_to_siglip(names, folders):
    old, new = folders("clip", "siglip")

    assert run("clip_to_siglip.ipynb", names | {"OLD": old, "NEW": new}) == {"siglip": 60}


@pytest.mark.slow
def test_minilm_to_bge(names, folders):
    old, new = folders("bert", "sentences")

    assert run("minilm_to_bge.ipynb", names | {"OLD": old, "NEW": new}) == {"bge": len(TEXTS)}


def test_provider_v1_to_v2(names, capsys):
    first, second = TextModel(8, 1), TextModel(10, 2)
    models = {"v1": lambda texts: [first(x) for x in texts], "v2": lambda texts: [second(x) for x in texts]}

    mix = run("provider_v1_to_v2.ipynb", names | models)

    shown = capsys.readouterr().out
    assert mix == {"provider-v2": len(TEXTS)}
    assert shown.count(TEXTS[-1]) == 2  # by the old model, and by the new one along the edge
    assert "matrix" in shown


def test_a_provider_that_takes_short_lists_is_asked_for_each_of_many_texts(names, tmp_path):
    lines = [f"{text} {number}" for number in range(15) for text in TEXTS]
    (tmp_path / "texts.txt").write_text("\n".join(lines))
    asked = []

    def provider(model):
        return lambda texts: asked.append(len(texts)) or [model(x) for x in texts]

    mix = run("provider_v1_to_v2.ipynb", names | {"v1": provider(TextModel(8, 1)), "v2": provider(TextModel(10, 2))})

    assert len(lines) - names["SAMPLE"] > 1000  # a page of those that lack the new vector
    assert mix == {"provider-v2": len(lines)}
    assert max(asked) <= 256
