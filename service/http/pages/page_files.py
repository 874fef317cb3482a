"""What the service's own pages share: their files, and a content security policy that lets them load nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from fastapi.responses import FileResponse


def page_headers(images: str) -> dict[str, str]:
    """Headers of a page and its files; `images`: other sources of images, as schemes of the policy."""
    policy = (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        f"img-src 'self' {images}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return {"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer"}


def page_file(package: str, name: str, media_type: str, headers: Mapping[str, str]) -> FileResponse:
    """A file from the folder `static` of a package."""
    return FileResponse(Path(str(files(package) / "static" / name)), media_type=media_type, headers=headers)
