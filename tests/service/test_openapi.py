"""The description of the API: it is fresh, and what it promises is what a real server answers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service.http.openapi import codes_by_status
from service.http.openapi_file import written
from service.settings import Settings

HERE = Path(__file__).parent
KEY = "the key of this whole server, forty letters"


def test_the_committed_description_is_fresh() -> None:
    committed = Path(__file__).parents[2] / "docs" / "openapi.json"

    assert committed.read_text() == written(), "run `make openapi`"


def test_every_operation_has_a_name_of_its_own_and_says_how_it_fails() -> None:
    document = json.loads(written())
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    names = [operation["operationId"] for operation in operations]

    assert "galleries_create" in names
    assert len(names) == len(set(names))
    assert all(re.fullmatch("[a-z]+(_[a-z]+)+", name) for name in names)
    for operation in operations:
        assert {"401", "422", "503"} <= set(operation["responses"])
    assert document["security"] == [{"bearer": []}]
    assert document["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
    assert document["paths"]["/v1/health"]["get"]["security"] == []


def test_every_status_of_an_error_is_described() -> None:
    described = json.loads(written())["components"]["responses"]

    for status, codes in codes_by_status().items():
        if status != 405:  # answers what is no operation
            assert all(code in described[f"Problem{status}"]["description"] for code in codes)


@pytest.fixture(scope="module")
def world(
    tmp_path_factory: pytest.TempPathFactory, serving: Any, versions: Any, pictures: Any
) -> Iterator[tuple[Any, dict[str, str]]]:
    """A server with keys, and what to send it."""
    headers = {"Authorization": f"Bearer {KEY}"}
    data = tmp_path_factory.mktemp("described") / "data"
    settings = Settings(data=data, api_key=KEY, worker_key=KEY[::-1], max_batch=30, max_body_bytes=1 << 20)
    with serving(settings, **headers) as served:
        for version in versions.values():
            assert served.register(version).status_code == 201
        furnish(served, pictures)
        yield served, headers


def furnish(served: Any, pictures: list[bytes]) -> None:
    """Galleries with something of everything; the names are in schemathesis.toml."""
    http = served.http

    def done(response: Any) -> Any:
        assert response.is_success, response.text
        return response.json()

    for name in ("photos", "mixed", "empty", "spare0", "spare1", "spare2"):
        done(http.post("/galleries", json={"name": name}))
    for name in ("photos", "mixed"):
        path = f"/galleries/{name}"
        done(http.post(f"{path}/deployments", json={"version": "v1"}))
        done(served.ingest(path, {f"i{n}": picture for n, picture in enumerate(pictures)}, label="a", n=1))
        items = [{"id": f"e{n}", "embedding": [1, n, 0, 0], "metadata": {"label": "b"}} for n in range(3)]
        done(http.post(f"{path}/items", json={"version": "v1", "items": items}))
        entries = [{"label": n % 2} for n in range(4)]
        vectors = {"v1": [[n, 1, 0, 0] for n in range(4)], "v2": [[n, 1, 0, 0, 0, 1] for n in range(4)]}
        done(http.post(f"{path}/evaluations", json={"name": "set", "entries": entries, "embeddings": vectors}))
    path = "/galleries/mixed"
    done(http.post(f"{path}/gates", json={"version": "v2", "label": "label", "sample": 20}))
    done(http.post(f"{path}/deployments", json={"version": "v2"}))
    done(http.post(f"{path}/backfills", json={"chunk_size": 4}))
    done(http.post("/work:claim", json={"worker": "w"}))


def test_the_service_answers_as_it_describes(world: Any, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    served, headers = world
    root = str(served.http.base_url).removesuffix("/v1/")
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(HERE / "schemathesis.toml"), "run"]
    command += [f"{root}/openapi.json", "--checks", "all", "--seed", "1", "--no-color"]
    command += ["--max-examples", str(request.config.getoption("--api-examples")), "--continue-on-failure"]
    command += [word for name, value in headers.items() for word in ("-H", f"{name}: {value}")]

    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)

    print(ran.stdout)
    assert ran.returncode == 0, ran.stderr
