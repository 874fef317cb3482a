"""`regraft key`: keys by a real service that asks for one."""

from __future__ import annotations

import json

import pytest

from regraft.client import Client, Problem
from service.settings import Settings
from staging.api.served import serving

KEY = "correct horse battery"


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with serving(Settings(data=tmp_path_factory.mktemp("keys"), api_key=KEY)) as served:
        yield served.url


@pytest.fixture(autouse=True)
def _own_key(monkeypatch):
    monkeypatch.setenv("REGRAFT_API_KEY", KEY)


def test_a_key_is_all_that_is_printed_and_opens_until_it_is_deleted(run, url):
    code, shown, said = run("key", "create", "shop", "--scope", "query", "--url", url)
    listed = run("key", "list", "--url", url)[1]

    assert code == 0
    assert "shop" in said
    with Client(url, shown.strip()) as client:
        assert client.galleries() == []
        with pytest.raises(Problem, match=r"admin.*shop.*query"):
            client.create_gallery("g")
        assert listed.splitlines()[1].split()[:2] == ["shop", "query"]
        assert run("key", "delete", "shop", "--url", url)[0] == 1  # nobody answers
        assert run("key", "delete", "shop", "--dry-run", "--url", url)[0] == 0
        assert client.galleries() == []
        assert run("key", "delete", "shop", "--yes", "--url", url)[0] == 0
        with pytest.raises(Problem, match="Authorization"):
            client.galleries()


def test_programs_get_the_key_as_json(run, url):
    made = json.loads(run("key", "create", "json", "--scope", "admin", "--url", url, "--json")[1])

    with Client(url, made["key"]) as client:
        assert [one.name for one in client.api_keys()] == ["json"]


def test_a_scope_that_there_is_not_is_told_with_those_there_are(run, url):
    code, _, said = run("key", "create", "shop", "--scope", "everything", "--url", url)

    assert code == 2
    assert all(scope in said for scope in ("query", "ingest", "admin"))


def test_a_key_of_some_galleries_says_so(run, url):
    with Client(url, KEY) as client:
        for name in ("shoes", "hats", "bags"):
            client.create_gallery(name)
    shown, said = run(
        "key", "create", "two", "--scope", "query", "--gallery", "shoes", "--gallery", "hats", "--url", url
    )[1:]

    assert "shoes, hats" in said
    assert "shoes, hats" in run("key", "list", "--url", url)[1]
    with Client(url, shown.strip()) as client:
        assert {one.name for one in client.galleries()} == {"shoes", "hats"}
        with pytest.raises(Problem, match=r"two.*shoes, hats"):
            client.gallery("bags")
