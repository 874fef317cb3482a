"""`/docs`: an interactive page of the HTTP API. All its files are served here, so it needs no network.

Swagger UI (Apache-2.0) is taken from the package `fastapi-offline`, of which nothing else is used.
"""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import FileResponse, HTMLResponse, Response

from service.http.pages.page_files import page_file, page_headers
from service.http.requests.checked_route import CheckedRoute

router = APIRouter(route_class=CheckedRoute, include_in_schema=False)

HEADERS = page_headers("data:")  # the arrows and locks inside the style sheet

SCRIPT, STYLE, START = "swagger-ui-bundle.js", "swagger-ui.css", "start.js"
# Relative addresses, since the service may be behind a proxy, below a prefix.
PAGE = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Regraft: HTTP API</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="docs/{STYLE}">
</head>
<body>
<div id="page"></div>
<script src="docs/{SCRIPT}"></script>
<script src="docs/{START}"></script>
</body>
</html>
"""
STARTING = """SwaggerUIBundle({
  url: "openapi.json", dom_id: "#page", deepLinking: true, docExpansion: "list", defaultModelsExpandDepth: 0,
  validatorUrl: null, displayRequestDuration: true,
});
"""
"""A separate file, because the policy permits no inline script."""


@router.get("/docs")
def read_page() -> HTMLResponse:
    """Get the page of the API reference."""
    return HTMLResponse(PAGE, headers=HEADERS)


@router.get(f"/docs/{START}")
def read_start() -> Response:
    """Get the script that starts Swagger UI."""
    return Response(STARTING, media_type="text/javascript", headers=HEADERS)


@router.get(f"/docs/{SCRIPT}")
def read_script() -> FileResponse:
    """Get the script of Swagger UI."""
    return page_file("fastapi_offline", SCRIPT, "text/javascript", HEADERS)


@router.get(f"/docs/{STYLE}")
def read_style() -> FileResponse:
    """Get the style sheet of Swagger UI."""
    return page_file("fastapi_offline", STYLE, "text/css", HEADERS)
