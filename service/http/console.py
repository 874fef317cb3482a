"""`/console`: a page that shows galleries, upgrades and searches. Every file of it comes from here.

The files hold no data and are given without a key; what the page shows it asks of the API, with the key that is entered
there. It changes nothing.
"""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import FileResponse, RedirectResponse

from service.http.pages import page_file, page_headers
from service.http.requests import CheckedRoute

router = APIRouter(route_class=CheckedRoute, include_in_schema=False)

# An item's image is asked for with the key, and so comes as a blob.
HEADERS = {**page_headers("data: blob:"), "Cache-Control": "no-cache"}
SCRIPT, STYLE = "/console/console.js", "/console/console.css"
PATHS = {"/", "/console", SCRIPT, STYLE}
"""Every path of this router."""


@router.get("/")
def redirect_to_console() -> RedirectResponse:
    """Redirect to the console."""
    return RedirectResponse("console", headers=HEADERS)


@router.get("/console")
def read_page() -> FileResponse:
    """Get the page of the console."""
    return page_file("service.http", "console.html", "text/html", HEADERS)


@router.get(SCRIPT)
def read_script() -> FileResponse:
    """Get the script of the console."""
    return page_file("service.http", "console.js", "text/javascript", HEADERS)


@router.get(STYLE)
def read_style() -> FileResponse:
    """Get the style sheet of the console."""
    return page_file("service.http", "console.css", "text/css", HEADERS)
