"""The face of Regraft: the client and the `regraft` command.

`from regraft import Client` imports httpx and numpy; the command imports the service or training when a command needs
them, and says which extra brings them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from regraft.own_packages import check_not_shadowed

if TYPE_CHECKING:
    from regraft.client import (
        AsyncClient,
        Client,
        ImageItem,
        InvalidInput,
        Problem,
        TextItem,
        TimedOut,
        UnexpectedAnswer,
        Unreachable,
    )
    from regraft.version import Version

__version__ = "0.2.0"
__all__ = [
    "AsyncClient",
    "Client",
    "ImageItem",
    "InvalidInput",
    "Problem",
    "TextItem",
    "TimedOut",
    "UnexpectedAnswer",
    "Unreachable",
    "Version",
    "__version__",
]

check_not_shadowed("index")


def __getattr__(name: str) -> Any:
    if name == "Version":
        from regraft.version import Version

        return Version
    if name in __all__:
        from regraft import client

        return getattr(client, name)
    raise AttributeError(f"module 'regraft' has no attribute {name!r}")
