"""Requests for deployments, gates and retirements, step by step, and their visible state."""

from __future__ import annotations

from typing import Any

from sqlalchemy import func, select

from service.store.tables import embedding, gallery, item

WAY = ("registered", "verified", "gated", "shadow", "canary", "current")


def deploy(served: Any, path: str, version: str = "v2", params: Any = None, headers: Any = None, **body: Any) -> Any:
    return served.http.post(
        f"{path}/deployments", json={"version": version, **body}, params=params or {}, headers=headers or {}
    )


def advance(served: Any, path: str, number: int, to: str, params: Any = None, headers: Any = None, **body: Any) -> Any:
    return served.http.post(
        f"{path}/deployments/{number}/advance", json={"to": to, **body}, params=params or {}, headers=headers or {}
    )


def rollback(served: Any, path: str, **options: Any) -> Any:
    return served.http.post(f"{path}/rollback", json={"reason": "a test"}, **options)


def gate(served: Any, path: str, version: str = "v2", params: Any = None, **body: Any) -> Any:
    return served.http.post(f"{path}/gates", json={"version": version, **body}, params=params or {})


def gate_by_digit(served: Any, path: str, version: str, **body: Any) -> Any:
    """A gate on the items' metadata `digit`, unless `body` says otherwise."""
    return gate(served, path, version, **{"label": "digit", **body})


def gate_id(served: Any, path: str, version: str = "v2") -> int:
    """The number of a gate on the items' metadata `digit`."""
    made = gate_by_digit(served, path, version)
    assert made.status_code == 201, made.text
    return int(made.json()["id"])


def refusal(response: Any) -> tuple[int, str, list[str]]:
    """Status, code, and the fields named in an answer."""
    return response.status_code, response.json()["code"], [error["pointer"] for error in response.json()["errors"]]


def detail(served: Any, path: str, number: int) -> dict[str, Any]:
    shown = served.http.get(f"{path}/deployments/{number}")
    assert shown.status_code == 200, shown.text
    return dict(shown.json())


def state_of(served: Any, path: str) -> dict[str, Any]:
    """All state that a refused change or a dry run must not change."""
    listed = served.http.get(f"{path}/deployments")
    shown = served.http.get(path).json()
    return {"deployments": listed.json(), "etag": listed.headers["etag"], "mix": shown["mix"], "seq": shown["seq"]}


def at(served: Any, path: str, state: str) -> int:
    """A deployment of v2 in this state."""
    number = deploy(served, path, until="registered").json()["id"]
    for step in WAY[1 : WAY.index(state) + 1]:
        taken = advance(served, path, number, step, **({"gate": gate_id(served, path)} if step == "gated" else {}))
        assert taken.status_code == 200, taken.text
    return int(number)


def reencode(served: Any, path: str) -> None:
    assert served.http.post(f"{path}/backfills", json={}).status_code == 202
    served.work()


def held(served: Any, path: str, version: str) -> int:
    """Embeddings of a version in a gallery, by SQL."""
    with served.runtime.database.lookup() as connection:
        statement = (
            select(func.count())
            .select_from(embedding.join(item).join(gallery))
            .where(
                gallery.c.name == path.rpartition("/")[2],
                embedding.c.version_id == served.runtime.registry.named(version).id,
            )
        )
        return int(connection.execute(statement).scalar_one())
