"""The description of the API: it is fresh, and what it promises is what a real server answers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from index.version import Version
from service.http.openapi import codes_by_status
from service.http.openapi_file import written
from service.settings import Settings
from staging.api.served import serving
from staging.inputs.builders import make_version

HERE = Path(__file__).parent
KEY = "the key of this whole server, forty letters"


@pytest.fixture(scope="module")
def fresh() -> str:
    """The file as it would be written now."""
    return written()


@pytest.fixture(scope="module")
def document(fresh: str) -> dict[str, Any]:
    return dict(json.loads(fresh))


def test_the_committed_description_is_fresh(fresh: str) -> None:
    committed = Path(__file__).parents[3] / "docs" / "openapi.json"

    assert committed.read_text() == fresh, "run `make openapi`"


def test_the_command_that_writes_it_takes_no_option_for_a_file(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "service.http.openapi_file", "--help"]
    paths = os.pathsep.join([str(Path(__file__).parents[3]), *sys.path])
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, check=True
    )

    assert b"FILE" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_every_operation_has_a_name_of_its_own_and_says_how_it_fails(document: dict[str, Any]) -> None:
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    names = [operation["operationId"] for operation in operations]

    assert "galleries_create" in names
    assert len(names) == len(set(names))
    assert not [operation["operationId"] for operation in operations if len(operation["summary"].split()) < 3]
    assert all(re.fullmatch("[a-z]+(_[a-z]+)+", name) for name in names)
    for operation in operations:
        assert {"401", "422", "503"} <= set(operation["responses"])
    assert document["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
    assert document["paths"]["/v1/health"]["get"]["security"] == []


def test_every_status_of_an_error_is_described(document: dict[str, Any]) -> None:
    described = document["components"]["responses"]

    for status, codes in codes_by_status().items():
        if status != 405:  # answers what is no operation
            assert all(code in described[f"Problem{status}"]["description"] for code in codes)


BODIES = {
    "POST /v1/galleries/{name}/query": {"version": "v1", "embeddings": [[1, 2, 3, 4]], "explain": True},
    "POST /v1/galleries/{name}/items": {"version": "v1", "items": [{"id": "new", "embedding": [1, 2, 3, 4]}]},
    "PUT /v1/galleries/{name}/items:embeddings": {"version": "v1", "items": [{"id": "new", "embedding": [1, 2, 3, 4]}]},
    "POST /v1/galleries/{name}/items:list": {"filter": {"field": "label", "eq": "a"}},
    "PATCH /v1/galleries/{name}/items": {"items": [{"id": "new", "metadata": {"seen": True, "label": None}}]},
    "POST /v1/galleries/{name}/items:delete": {"ids": ["new", "unknown"]},
    "POST /v1/galleries/{name}/deployments": {"version": "v1", "until": "registered"},
    "POST /v1/galleries/{name}/deployments/{number}/advance": {"to": "verified"},
    "POST /v1/galleries/{name}/retire": {"version": "v1", "reason": "tried"},
    "POST /v1/galleries/{name}/evaluations": {
        "entries": [{"label": 0}, {"label": 0}],
        "embeddings": {"v1": [[1, 0, 0, 0], [1, 0, 0, 1]]},
    },
    "POST /v1/edges": {"new": "v2", "old": "w0", "kind": "truncate", "replace": True},
    "POST /v1/edges:fit": {"new": "v2", "old": "v1", "kind": "ridge", "gallery": "paired", "replace": True},
    "POST /v1/galleries/{name}/gates": {"version": "v2", "label": "label", "sample": 20},
}
"""One that the service takes, of each operation of whose bodies hardly any that is legal is taken."""

Real = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def registered(tmp_path_factory: pytest.TempPathFactory, versions: Any) -> list[Version]:
    """The versions of other tests, and some that can be deleted."""
    root = tmp_path_factory.mktemp("spare")
    spare = [make_version(root / f"w{n}", f"w{n}", 6, edges=[(versions["v1"], "truncate")]) for n in range(3)]
    return [*versions.values(), *spare]


def furnish(served: Any, pictures: list[bytes]) -> Real:
    """Galleries with something of everything, and some of each that can be changed or deleted; what is where."""
    http = served.http

    def done(response: Any) -> Any:
        assert response.is_success, response.text
        return response.json()

    def gallery(name: str, *deployed: str) -> str:
        done(http.post("/galleries", json={"name": name}))
        for version in deployed[:1]:
            done(http.post(f"/galleries/{name}/deployments", json={"version": version}))
            images = {f"i{n}": picture for n, picture in enumerate(pictures[:8])}
            done(served.ingest(f"/galleries/{name}", images, label="a", n=1))
            items = [{"id": f"e{n}", "embedding": [1, n, 0, 0], "metadata": {"label": "b"}} for n in range(20)]
            done(http.post(f"/galleries/{name}/items", json={"version": "v1", "items": items}))
        for version in deployed[1:]:
            done(http.post(f"/galleries/{name}/deployments", json={"version": version}))
        return name

    def evaluation(name: str) -> dict[str, Any]:
        entries = [{"label": n % 2} for n in range(4)]
        vectors = {"v1": [[n, 1, 0, 0] for n in range(4)], "v2": [[n, 1, 0, 0, 0, 1] for n in range(4)]}
        body = {"name": "set", "entries": entries, "embeddings": vectors}
        return {"name": name, "number": done(http.post(f"/galleries/{name}/evaluations", json=body))["id"]}

    def backfill(name: str, chunk_size: int) -> dict[str, Any]:
        return {"number": done(http.post(f"/galleries/{name}/backfills", json={"chunk_size": chunk_size}))["id"]}

    def one(path: str, name: str, **body: Any) -> dict[str, Any]:
        return {"name": name, "number": done(http.post(f"/galleries/{name}/{path}", json=body))["id"]}

    spare = [{"name": gallery(f"spare{n}")} for n in range(8)]
    still, steps = gallery("still", "v1"), [gallery(f"steps{n}", "v1") for n in range(3)]
    paired = gallery("paired", "v1")
    turned = [gallery(f"turned{n}", "v1", "v2") for n in range(3)]
    moved = [gallery(f"moved{n}", "v1", "v2") for n in range(4)]
    for version, dim in (("v1", 4), ("v2", 6)):  # items to fit on
        items = [{"id": f"p{n}", "embedding": [1 + n % 5, n, *[1] * (dim - 2)]} for n in range(24)]
        done(http.post(f"/galleries/{paired}/items", json={"version": version, "items": items}))
    gate = one("gates", still, version="v2", label="label", sample=20)
    advancing = [one("deployments", name, version="v2", until="registered") for name in steps]
    running, paused, last, ended = (backfill(name, size) for name, size in zip(moved, (1, 4, 4, 4), strict=True))
    done(http.post(f"/backfills/{ended['number']}/cancel"))  # the events of one that runs have no end
    claims = [done(http.post("/work:claim", json={"worker": "w"})) for _ in range(4)]
    leased = [{"chunk": claim["chunk"], "lease": claim["lease"]} for claim in claims]
    kept, removable = evaluation(still), [evaluation(still) for _ in range(6)]
    items = [{"name": still, "item_id": f"i{n}"} for n in range(4)]
    base, any_gallery = "/v1/galleries/{name}", [{"name": name} for name in (still, "moved1", "turned0")]
    edge = {"new": "v2", "old": "v1", "kind": "truncate"}
    galleries = ("/query", "/items", "/items:list", "/items:delete", "/evaluations", "/gates", "/backfills")
    return {
        **{f"{base}{path}": any_gallery for path in ("", *galleries)},
        f"DELETE {base}": spare,
        f"POST {base}/items:delete": any_gallery[1:],
        f"POST {base}/backfills": [{"name": name} for name in turned],
        f"{base}/items/{{item_id}}": items,
        f"{base}/items/{{item_id}}/image": items,
        f"DELETE {base}/items/{{item_id}}": [{"name": still, "item_id": f"e{n}"} for n in range(20)],
        f"{base}/evaluations/{{number}}": [kept],
        f"DELETE {base}/evaluations/{{number}}": removable,
        f"{base}/gates/{{number}}": [gate],
        f"{base}/gates/{{number}}/page": [gate],
        f"{base}/deployments": [{"name": name} for name in turned],
        f"{base}/deployments/{{number}}": advancing,
        f"{base}/deployments/{{number}}/advance": advancing,
        f"{base}/rollback": [{"name": name} for name in turned],
        f"{base}/retire": [{"name": name} for name in turned],
        "/v1/backfills/{number}": [running, paused],
        "/v1/backfills/{number}/pause": [running, paused],
        "/v1/backfills/{number}/resume": [running, paused],
        "/v1/backfills/{number}/cancel": [last],
        "/v1/backfills/{number}/events": [ended],
        "/v1/backfills/{number}/failures": [running, ended],
        "/v1/versions/{name}": [{"name": "v1"}, {"name": "plain"}],
        "DELETE /v1/versions/{name}": [{"name": f"w{n}"} for n in range(3)],
        "/v1/edges/{new}/{old}/{kind}": [edge],
        "DELETE /v1/edges/{new}/{old}/{kind}": [edge, *({**edge, "new": f"w{n}"} for n in range(3))],
        "/v1/work/{chunk}": leased[:2],
        "/v1/work/{chunk}/extend": leased[:2],
        "/v1/work/{chunk}/release": leased[2:],
        "/v1/work/versions/{name}": [{"name": "v1"}, {"name": "v2"}],
        "/v1/work/edges/{number}": [{"number": 1}],
    }


@pytest.mark.timeout(0)  # as long as --api-examples makes it
@pytest.mark.parametrize(
    ("keyed", "drawn"),
    [
        pytest.param(True, ("--mode", "positive", "--phases", "fuzzing"), id="with keys, what is legal"),
        pytest.param(True, (), id="with keys", marks=pytest.mark.slow),
        pytest.param(False, ("--phases", "fuzzing"), id="without a key", marks=pytest.mark.slow),
    ],
)
def test_the_service_answers_as_it_describes(
    keyed: bool,
    drawn: tuple[str, ...],
    registered: list[Version],
    pictures: Any,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    headers = {"Authorization": f"Bearer {KEY}"} if keyed else {}
    keys: dict[str, Any] = {"api_key": KEY, "worker_key": KEY[::-1]} if keyed else {}
    settings = Settings(data=tmp_path / "data", max_batch=30, max_body_bytes=1 << 20, **keys)
    with serving(settings, **headers) as served:
        for version in registered:
            assert served.register(version).status_code == 201
        fields = {field: ["v1", "v2"] for field in ("version", "new", "old")} | {"gallery": ["still"]}
        real = tmp_path / "real.json"
        real.write_text(json.dumps({"paths": furnish(served, pictures), "bodies": BODIES, "fields": fields}))
        root = served.url
        command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(HERE / "schemathesis.toml"), "run"]
        command += [f"{root}/openapi.json", "--checks", "all", "--seed", "1", "--no-color", *drawn]
        command += ["--max-examples", str(request.config.getoption("--api-examples")), "--continue-on-failure"]
        command += [word for name, value in headers.items() for word in ("-H", f"{name}: {value}")]

        # Which characters there are is worked out anew, half of the time, but where it is kept from an earlier run.
        kept = {"HYPOTHESIS_STORAGE_DIRECTORY": str(HERE.parents[2] / ".hypothesis")}
        hooks = {"SCHEMATHESIS_HOOKS": str(HERE / "schemathesis_hooks.py"), "REAL": str(real), **kept}
        ran = subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, check=False, env={**os.environ, **hooks}
        )
        fitted = [
            (edge["new"], edge["old"]) for edge in served.http.get("/edges").json()["edges"] if edge["kind"] == "matrix"
        ]

    print(ran.stdout)
    assert ran.returncode == 0, ran.stderr
    assert drawn or ("v2", "v1") in fitted  # of the requests for a fit one at least was a success
