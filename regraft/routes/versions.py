"""Client methods for versions."""

from __future__ import annotations

import tempfile
from pathlib import Path

from regraft import inputs
from regraft.connection import Connection
from regraft.models import VersionInfo, VersionList
from regraft.paths import change_params, delete_params, path_of
from regraft.routes.route import route


class VersionRoutes(Connection):
    """Methods of both clients."""

    @route
    async def register_version(self, folder: Path, *, dry_run: bool = False) -> VersionInfo:
        """POST /v1/versions: register a version folder or a .zip of one; `dry_run`: the service only verifies it."""
        with tempfile.TemporaryDirectory() as scratch:
            archive = await self._run_blocking(inputs.archive, folder, Path(scratch))
            with archive.open("rb") as stream:
                files = {"archive": (archive.name, stream, "application/zip")}
                return await self._ask(VersionInfo, "POST", "versions", params=change_params(dry_run), files=files)

    @route
    async def versions(self) -> list[VersionInfo]:
        """GET /v1/versions."""
        return (await self._ask(VersionList, "GET", "versions")).versions

    @route
    async def version(self, name: str) -> VersionInfo:
        """GET /v1/versions/{version}."""
        return await self._ask(VersionInfo, "GET", path_of("versions", name))

    @route
    async def delete_version(self, name: str, *, dry_run: bool = False) -> None:
        """DELETE /v1/versions/{version}: delete an unused version and the edges from it."""
        await self._delete(path_of("versions", name), params=delete_params(name, dry_run))
