"""The public package of Regraft: the clients (`regraft.client`) and the `regraft` command (`regraft.cli`).

`from regraft import Client` imports only httpx and numpy. The command imports the service or training when a command
needs them; an error names the extra that installs them.
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
