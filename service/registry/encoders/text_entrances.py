"""Open the text entrance of a version: its own model, or a provider's API."""

from __future__ import annotations

from collections.abc import Collection

from index.encoders.text import TextEncoder
from index.execution import Execution
from index.version import Version
from service.registry.encoders.embedding_api import ApiEncoder


def open_texts(version: Version, execution: Execution, apis: Collection[str]) -> TextEncoder | ApiEncoder:
    """The text entrance of a version.

    Args:
        version: with or without a text entrance.
        execution: how its own model runs.
        apis: the base URLs of embedding APIs that may be called.

    Raises:
        NoTextEntrance: it has none.
        InvalidVersionFolder: its model or probe does not match the card.
        ProviderUnavailable: its API is not in `apis`.
    """
    return TextEncoder(version, execution) if version.card.api is None else ApiEncoder(version, apis)
