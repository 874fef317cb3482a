"""The console: a page from here alone, open without a key, that puts nothing it is told into markup."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from urllib.parse import urljoin

import httpx
import pytest

from regraft import models
from regraft.connection import is_header_value
from service.settings import Settings
from staging.api.served import problem, serving


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client without a key that starts at the root of a server which asks for one."""
    settings = Settings(data=tmp_path_factory.mktemp("console"), api_key="correct horse battery")
    with serving(settings) as running, httpx.Client(base_url=running.http.base_url.join("/")) as client:
        yield client


@pytest.fixture(scope="module")
def script(site: httpx.Client) -> str:
    return site.get("/console/console.js").text


def test_what_a_browser_opens_first_leads_to_a_page_that_is_open_as_nothing_else_is(
    site: httpx.Client,
) -> None:
    first = site.get("/")
    page = site.get(urljoin("/", first.headers["location"]))
    needed = re.findall(r'(?:src|href)="([a-z/.]+)"', page.text)

    assert (first.status_code, page.status_code, page.headers["content-type"]) == (307, 200, "text/html; charset=utf-8")
    assert needed == ["console/console.css", "docs", "console/console.js"]
    types = [site.get(f"/{name}").headers["content-type"].partition(";")[0] for name in needed]
    assert types == ["text/css", "application/problem+json", "text/javascript"]
    for closed in ("/docs", "/v1/galleries", "/console/", "/console/console.html", "/console/../v1/galleries"):
        problem(site.get(closed), 401, "unauthorized")


def test_it_loads_nothing_from_elsewhere_and_nothing_inline(site: httpx.Client, script: str) -> None:
    page = site.get("/console")
    policy = dict(rule.split(" ", 1) for rule in page.headers["content-security-policy"].split("; "))

    assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert not re.search(r"<script>|<style|\son\w+=|style=", page.text)
    assert set(re.findall(r"https?://[\w./]+", page.text + script)) == {"http://www.w3.org/2000/svg"}


def test_what_the_service_tells_never_becomes_markup(script: str) -> None:
    markup = r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(|new Function|srcdoc|DOMParser"

    assert not re.search(markup, script)


def test_a_key_is_taken_that_a_header_can_carry(script: str) -> None:
    (legal,) = re.findall(r'pattern: "([^"]+)"', script)

    for key in ("correct horse battery", "rg_0-_~!", "“correct horse”", "schlüssel", "a\u2026"):
        assert bool(re.fullmatch(legal, key)) == is_header_value(key)


def test_it_reads_what_the_api_tells(script: str) -> None:
    told = {
        name
        for kind in vars(models).values()
        if inspect.isclass(kind) and issubclass(kind, models.ApiModel)
        for name in kind.model_fields
    }
    read = set(re.findall(r"\b(?:one|gallery|match|found|point|answer|index|curve)\.([a-z_]+)\b(?!\()", script))

    assert len(read) > 30
    assert read - told - {"ok", "status", "kind", "length"} == set()
