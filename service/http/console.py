"""`/console`: a page that shows galleries, upgrades and searches. Every file of it comes from here.

The files hold no data and are given without a key; what the page shows it asks of the API, with the key that is entered
there. It changes nothing.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse, RedirectResponse

from service.http.requests import CheckedRoute

router = APIRouter(route_class=CheckedRoute, include_in_schema=False)

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data: blob:; "  # an item's image is asked for with the key, and so comes as a blob
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy of the page: its own files and requests to this service, nothing else and nothing inline."""
HEADERS = {"Content-Security-Policy": POLICY, "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
SCRIPT, STYLE = "/console/console.js", "/console/console.css"
PATHS = {"/", "/console", SCRIPT, STYLE}
"""All that is answered here."""


@router.get("/")
def lead_on() -> RedirectResponse:
    """What a browser opens first leads to the page."""
    return RedirectResponse("console", headers=HEADERS)


@router.get("/console")
def read_page() -> FileResponse:
    """The page."""
    return _file("console.html", "text/html")


@router.get(SCRIPT)
def read_script() -> FileResponse:
    """What it does."""
    return _file("console.js", "text/javascript")


@router.get(STYLE)
def read_style() -> FileResponse:
    """How it looks."""
    return _file("console.css", "text/css")


def _file(name: str, media_type: str) -> FileResponse:
    return FileResponse(Path(str(files("service.http") / "static" / name)), media_type=media_type, headers=HEADERS)
