"""Settings: from the environment (`REGRAFT_...`) or given in code."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """Where things are and how much is accepted. Every field is read from `REGRAFT_<NAME>`."""

    model_config = SettingsConfigDict(env_prefix="REGRAFT_", frozen=True)

    data: Path = Path("regraft-data")
    """Folder of the database, the images and the version folders, unless the next two say otherwise."""
    database_url: str = ""
    """SQLAlchemy URL; empty: SQLite in `data`."""
    blobs_url: str = ""
    """fsspec URL of the images; empty: the folder blobs/ in `data`."""

    host: str = "127.0.0.1"
    port: int = Field(8080, ge=0, le=65_535)
    api_key: SecretStr | None = Field(None, min_length=1)
    """Every request must carry it as `Authorization: Bearer <key>`; needed to listen beyond loopback."""

    worker_key: SecretStr | None = Field(None, min_length=1)
    """What remote workers send instead of the API key; it opens the routes below /v1/work and no others."""

    max_image_pixels: int = Field(50_000_000, ge=1)
    max_body_bytes: int = Field(256 << 20, ge=1)
    max_archive_bytes: int = Field(2 << 30, ge=1)
    """Largest version archive that can be uploaded."""
    max_batch: int = Field(10_000, ge=1)
    """Items, ids or queries in one request."""
    max_results: int = Field(1_000_000, ge=1)
    """Matches in one response: queries times k."""

    threads: int = Field(32, ge=1)
    """Queries answered at the same time; most of them wait for the batch they are encoded in."""
    encoder_threads: int = Field(1, ge=1)
    """Threads that onnxruntime uses for one batch."""
    batch_wait_ms: float = Field(2.0, ge=0)
    """How long a query may wait for others that are being read, to be encoded with them; alone it never waits."""
    encoder_idle_seconds: float = Field(300.0, gt=0)
    """An encoder that no gallery needs and nobody has used for so long is dropped from memory."""
    poll_seconds: float = Field(0.02, gt=0)
    """How often the replica and the worker look for news."""
    lease_seconds: float = Field(30.0, gt=0)
    """How long a worker may hold a chunk without a sign of life."""

    @model_validator(mode="after")
    def _fill_urls(self) -> Self:
        data = self.data.absolute()
        # Frozen for everyone else: these two are part of construction.
        object.__setattr__(self, "database_url", self.database_url or f"sqlite:///{data / 'regraft.db'}")
        object.__setattr__(self, "blobs_url", self.blobs_url or f"file://{data / 'blobs'}")
        return self

    @property
    def versions(self) -> Path:
        """Folder of the registered version folders."""
        return self.data / "versions"

    @property
    def edges(self) -> Path:
        """Folder of the files of edges that were added or fitted."""
        return self.data / "edges"
