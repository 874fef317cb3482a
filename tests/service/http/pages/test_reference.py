"""The page of the HTTP API: everything it needs comes from the service, under a strict policy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urljoin

import httpx
import pytest


@pytest.fixture
def site(served: Any) -> Iterator[httpx.Client]:
    """A client that starts at the root of the server."""
    with httpx.Client(base_url=served.http.base_url.join("/")) as client:
        yield client


def test_the_page_loads_nothing_from_elsewhere(site):
    page = site.get("/docs")
    needed = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    start = site.get("/docs/start.js")
    needed += re.findall(r'url: "([^"]+)"', start.text)

    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "://" not in page.text + start.text
    found = {name: site.get(urljoin("/docs", name)) for name in needed if name != "data:,"}
    assert {name: answer.status_code for name, answer in found.items()} == dict.fromkeys(
        ("docs/swagger-ui.css", "docs/swagger-ui-bundle.js", "docs/start.js", "openapi.json"), 200
    )
    assert "SwaggerUIBundle" in found["docs/swagger-ui-bundle.js"].text


def test_the_policy_allows_no_other_site_and_nothing_inline(site):
    page = site.get("/docs")
    policy = dict(rule.split(" ", 1) for rule in page.headers["content-security-policy"].split("; "))

    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert not re.search(r"<script>|<style|\son\w+=|style=", page.text)


def test_no_other_page_of_documentation_is_there(site):
    assert {site.get(path).status_code for path in ("/redoc", "/docs/../app.py", "/docs/redoc.standalone.js")} == {404}
