"""A service with two versions and an embedding API, its client, and a gallery of all that an item can hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from regraft import Client
from regraft.client import ImageItem
from service.settings import Settings
from staging.api.served import Served, serving
from staging.external.provider import Provider, providing
from staging.inputs.builders import add_text, image_bytes, make_image, make_version
from staging.states.transferred import COUNT, NEW, OLD, gallery


@pytest.fixture
def provider() -> Iterator[Provider]:
    with providing() as running:
        yield running


@pytest.fixture
def served(settings: Settings, provider: Provider, tmp_path: Path) -> Iterator[Served]:
    settings = settings.model_copy(update={"embedding_apis": provider.url})
    v1 = add_text(make_version(tmp_path / "v1", "v1", 4), {"east": OLD[0], "north": OLD[1]})
    v2 = make_version(tmp_path / "v2", "v2", 6, edges=[(v1, "truncate")])
    with serving(settings) as running:
        for version in (v1, add_text(v2, {"east": NEW[0], "north": NEW[1]})):
            assert running.register(version).status_code == 201
        yield running


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with Client(served.url) as made:
        yield made


@pytest.fixture
def full(client: Client) -> str:
    """Items by v1 and most by v2 too, some of those transformed; one has v2 only, one an image; v2 is current."""
    name = gallery(client, "full", "v1")
    items = [
        {"id": f"ä/{n}", "metadata": {"n": n, "deep": {"a": [1, None]}}, "embedding": OLD[n]} for n in range(COUNT)
    ]
    client.ingest_embeddings(name, items)
    client.ingest(name, [ImageItem("image", image_bytes(make_image(1, 1)), {"label": "x"})])
    client.deploy(name, "v2")
    second = [{"id": f"ä/{n}", "embedding": NEW[n]} for n in range(COUNT)]
    client.put_embeddings(name, second[:8], version="v2")
    client.put_embeddings(name, second[8:12], version="v2", origin="transformed")
    client.ingest_embeddings(name, [{"id": "only", "embedding": NEW[0]}], version="v2")
    client.delete_item(name, "ä/3")
    return name
