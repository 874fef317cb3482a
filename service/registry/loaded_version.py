"""`LoadedVersion`: a registered version in this process, with encoders that are loaded on first use.

A version whose folder is no longer as registered is quarantined once this is noticed: its card, its embeddings in SQL
and encoders in memory stay valid, but nothing is read from its folder any more.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, cast

from index.encoders.encoder import Encoder
from index.errors import ChangedOnDisk, InvalidVersionFolder
from index.events import Event
from index.space import Space, space_from_json
from index.version import Card, Version
from index.version_folder.folder import load_version
from service.errors import VersionBroken
from service.registry.encoders.modalities import ImageModality, Lazy, TextModality
from service.registry.stored_contents import TextEntrance
from service.settings import Settings
from service.store.rows import VersionRow

logger = logging.getLogger(__name__)


class LoadedVersion:
    """One registered version, with encoders that are loaded on first use; `problem`: why it is quarantined."""

    def __init__(self, row: VersionRow, loaded: Version, settings: Settings, problem: str = "") -> None:
        self.id = row.id
        self.card_sha256 = row.card_sha256
        self.created = row.created
        self.problem = problem
        self.version = loaded
        self._lazy: dict[str, Lazy[Any]] = {
            "images": Lazy(lambda: ImageModality(loaded, settings)),
            "texts": Lazy(lambda: TextModality(loaded, settings)),
        }

    @property
    def name(self) -> str:
        """The version's name."""
        return self.version.name

    @property
    def card(self) -> Card:
        """The version's card."""
        return self.version.card

    @cached_property
    def space(self) -> Space:
        """The space of its embeddings."""
        return space_from_json(self.card.space)

    def check(self) -> None:
        """Raise VersionBroken if it is quarantined."""
        if self.problem:
            raise VersionBroken(f"version {self.name!r} is quarantined because its folder is damaged: {self.problem}")

    def quarantine(self, problem: str) -> None:
        """Quarantine the version: nothing is read from its folder any more."""
        logger.error(Event("version_quarantined", version=self.name, reason=problem))
        self.problem = problem

    def check_folder(self) -> None:
        """Hash every file of its folder; a difference quarantines the version. Raises VersionBroken."""
        self.check()
        try:
            load_version(self.version.folder, expect_card=self.card_sha256)
        except (InvalidVersionFolder, OSError) as error:
            self.quarantine(str(error))
            self.check()

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Context of opening files of its folder: a changed file quarantines the version. Raises VersionBroken."""
        try:
            yield
        except ChangedOnDisk as error:
            self.quarantine(error.message)
            raise VersionBroken(f"version {self.name!r} is quarantined: {error.message}") from error
        except InvalidVersionFolder as error:  # the files are intact: memory may be short, and a retry may succeed
            raise VersionBroken(f"version {self.name!r} cannot be opened: {error.message}") from error

    def images(self) -> ImageModality:
        """The version's image encoder, loaded on first use. Raises NoEncoder, VersionBroken."""
        return cast(ImageModality, self._open("images"))

    def encoder(self) -> Encoder:
        """The image encoder without batching, for callers with many images at once. Raises as `images`."""
        return self.images().encoder

    def text_encoder(self) -> TextEntrance:
        """The text entrance without batching. Raises as `texts`."""
        return self.texts().encoder

    def texts(self) -> TextModality:
        """The version's text entrance, loaded on first use. Raises NoTextEntrance, VersionBroken."""
        return cast(TextModality, self._open("texts"))

    def can_open(self, entrance: str) -> bool:
        """Whether `images` or `texts` can be opened: it is in memory, or the folder is not known to be damaged."""
        return not self.problem or self._lazy[entrance].loaded

    def can_embed(self, *entrances: str) -> bool:
        """Whether it has one of these entrances, `images` and `texts`, that can be opened."""
        declared = {"images": self.card.encoder, "texts": self.card.text}
        return any(declared[entrance] and self.can_open(entrance) for entrance in entrances)

    def _open(self, entrance: str) -> Any:
        if not self.can_open(entrance):
            self.check()
        with self.opening():
            return self._lazy[entrance].get()

    @property
    def loaded(self) -> list[str]:
        """Which of its encoders are in memory: `images`, `texts`."""
        return [name for name, lazy in self._lazy.items() if lazy.loaded]

    def drop_idle(self, needed: bool, idle_seconds: float) -> None:
        """Drop encoders that were not used for `idle_seconds`; `needed` counts as a use."""
        for lazy in self._lazy.values():
            if needed:
                lazy.touch()
            lazy.drop(idle_seconds)
