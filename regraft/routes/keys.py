"""Client methods for API keys."""

from __future__ import annotations

from collections.abc import Sequence

from regraft.connection import Connection
from regraft.models import KeyInfo, KeyList, KeyScope, NewKey
from regraft.paths import delete_params, path_of
from regraft.routes.route import route


class KeyRoutes(Connection):
    """Methods of both clients."""

    @route
    async def create_api_key(self, name: str, scope: KeyScope, *, galleries: Sequence[str] | None = None) -> NewKey:
        """POST /v1/keys: create a key for reading and queries; `ingest`: also for changes of items; `admin`: for all.

        `galleries`: only for these. Only this answer has the key itself.
        """
        chosen = None if galleries is None else list(galleries)
        return await self._ask(NewKey, "POST", "keys", json={"name": name, "scope": scope, "galleries": chosen})

    @route
    async def api_keys(self) -> list[KeyInfo]:
        """GET /v1/keys."""
        return (await self._ask(KeyList, "GET", "keys")).keys

    @route
    async def delete_api_key(self, name: str, *, dry_run: bool = False) -> None:
        """DELETE /v1/keys/{key}: revoke a key; effective in every process within a second."""
        await self._delete(path_of("keys", name), params=delete_params(name, dry_run))
