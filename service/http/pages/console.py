"""`/console`: a read-only page that shows galleries, upgrades and searches. All its files are served here.

The files have no data and need no key. The page requests its data from the API, with the key that the user enters.
"""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import FileResponse, RedirectResponse

from service.http.pages.page_files import page_file, page_headers
from service.http.requests.checked_route import CheckedRoute

router = APIRouter(route_class=CheckedRoute, include_in_schema=False)

# The page requests images with the key, and shows them as blobs.
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
    return page_file("service.http.pages", "console.html", "text/html", HEADERS)


@router.get(SCRIPT)
def read_script() -> FileResponse:
    """Get the script of the console."""
    return page_file("service.http.pages", "console.js", "text/javascript", HEADERS)


@router.get(STYLE)
def read_style() -> FileResponse:
    """Get the style sheet of the console."""
    return page_file("service.http.pages", "console.css", "text/css", HEADERS)
