"""Settings: from the environment (`REGRAFT_...`) or given in code."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal, Self

from pydantic import ByteSize, Field, SecretStr, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from index.encoders.decoding import MAX_DECODED_BYTES
from index.encoders.image import MAX_PIXELS, PILLOWS_PIXELS
from index.execution import Device, Execution
from index.isolated import Limits
from service.logs import LogFormat, LogLevel

VectorStore = Literal["sql", "objects"]
"""Where vectors are stored: in the database, or settled ones in files of the image store."""

CONNECTIONS = 64

LONGEST = 1e9
"""Most seconds of a setting, about thirty years; timers do not take much more."""

SIZE = re.compile(r"\s*\d*\.?\d+\s*[A-Za-z]*\s*")
"""A size as ByteSize reads it: a number and perhaps a unit."""

MIN_KEY = 16
"""Least characters of a key; shorter ones could be guessed by trying."""


CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Memory limit files of cgroups version 2 and 1, which hold a number of bytes or `max`."""


def memory_there() -> int:
    """Bytes of memory of this machine, or of the container if its limit is lower."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = [path.read_text().strip() for path in CGROUP_LIMITS if path.is_file()]
    return min([machine, *(int(limit) for limit in found if limit.isdecimal())])


def _with_driver(url: str) -> str:
    """Add psycopg, the installed driver, to a PostgreSQL URL without one."""
    scheme, _, rest = url.partition("://")
    return f"postgresql+psycopg://{rest}" if scheme in {"postgres", "postgresql"} else url


class Settings(BaseSettings):
    """The settings of the service and its workers (docs/settings.md); each field is read from `REGRAFT_<NAME>`."""

    # Errors do not show their input, which could be a key.
    model_config = SettingsConfigDict(
        env_prefix="REGRAFT_", frozen=True, hide_input_in_errors=True, allow_inf_nan=False
    )

    data: Path = Path("regraft-data")
    """Folder of the database, images and version folders, unless `database_url` and `blobs_url` move them."""
    database_url: str = ""
    """SQLAlchemy URL; empty: SQLite in `data`."""
    connections: int = Field(CONNECTIONS, ge=16)
    """Most PostgreSQL connections of one process: half of them for changes, each of which holds one while it waits for
    its gallery; so at least twice `threads`."""
    blobs_url: str = ""
    """fsspec URL of the images; empty: the folder blobs/ in `data`."""
    vectors: VectorStore = "sql"
    """Where vectors are stored that were not written for a minute; newer ones are in the database."""
    pgvector_url: str = ""
    """URL of the PostgreSQL with pgvector for galleries; empty: the database, if it is a PostgreSQL."""
    milvus_uri: str = Field("", pattern=r"^(https?://[^\s]+)?$")
    """http:// or https:// URI of the Milvus for galleries, optionally with a database name as path."""
    milvus_token: SecretStr = SecretStr("")
    """`user:password`, or a key of that Milvus; empty: none."""
    engine_seconds: float = Field(2.0, ge=0.1, le=60.0)
    """How long a query waits for an engine's answer; each read of a gallery's load waits five times as long."""

    host: str = "127.0.0.1"
    port: int = Field(8080, ge=0, le=65_535)
    processes: int = Field(1, ge=1)
    """Server processes that share the port."""
    api_key: SecretStr | None = None
    """Every request must carry it as `Authorization: Bearer <key>`; needed to listen beyond loopback."""
    worker_key: SecretStr | None = None
    """The key of remote workers; it permits only the routes below /v1/work."""

    max_image_pixels: int = Field(MAX_PIXELS, ge=1, le=PILLOWS_PIXELS)
    max_request_pixels: int = Field(4_000_000_000, ge=1)
    """Most pixels of all images that are decoded for one request, which bounds its time to some minutes."""
    max_decoded_bytes: int = Field(MAX_DECODED_BYTES, ge=1)
    """Memory of the images that one process decodes at the same time; a larger one is decoded alone."""
    max_body_bytes: int = Field(256 << 20, ge=1)
    """Largest request except version archives; also the most metadata, or texts, of all matches in a response."""
    max_json_bytes: int = Field(32 << 20, ge=1)
    """Largest JSON of items, queries and evaluation sets."""
    max_model_bytes: int = Field(1 << 20, ge=1)
    """Largest JSON of every other request."""
    max_archive_bytes: int = Field(2 << 30, ge=1)
    """Largest version archive that can be uploaded."""
    verify_seconds: float = Field(300.0, gt=0, le=LONGEST)
    """How long the models of one archive may take to be verified."""
    verify_memory_bytes: int = Field(4 << 30, ge=1 << 29)
    """Memory limit of the process that verifies them."""
    max_metadata_bytes: int = Field(64 << 10, ge=2)
    """Largest metadata of an item, or label or metadata of an entry of an evaluation set, as JSON."""
    max_text_bytes: int = Field(64 << 10, ge=1)
    """Largest text of an item, in UTF-8."""
    max_batch: int = Field(10_000, ge=1)
    """Most items, ids or queries in one request."""
    max_results: int = Field(1_000_000, ge=1)
    """Most matches in one response: queries times k."""

    min_free_bytes: int = Field(256 << 20, ge=0)
    """Free space on the data folder's disk below which readiness is `degraded`."""

    log_format: LogFormat = "console"
    """`console`: lines for people; `json`: one object per line."""
    log_level: LogLevel = "info"
    """The lowest level that is written."""

    memory: ByteSize = Field(default_factory=lambda: ByteSize(memory_there() // 2), ge=1)
    """Memory for loaded galleries; the least recently used are unloaded, and loaded again on demand."""
    threads: int = Field(32, ge=1)
    """Concurrent queries, most of which wait for the batch they are encoded in."""
    search_threads: int = Field(default_factory=lambda: len(os.sched_getaffinity(0)), ge=1)
    """Concurrent searches by embeddings."""
    encoder_device: Device = Device.CPU
    """The device of encoders: `cpu`, or `cuda` with the extra `regraft[gpu]`."""
    index_device: Device = Device.CPU
    """The device that searches sealed segments: `cpu`, or `cuda` with the extra `regraft[gpu-index]`."""
    encoder_threads: int = Field(1, ge=1)
    """Threads that onnxruntime uses for one batch."""
    batch_wait_ms: float = Field(2.0, ge=0, le=LONGEST)
    """How long a query may wait for others that are being read, to be encoded in one batch; alone it never waits."""
    encoder_idle_seconds: float = Field(300.0, gt=0, le=LONGEST)
    """An encoder that no gallery needs is dropped from memory after so long without use."""
    embedding_apis: str = ""
    """Base URLs of the embedding APIs that versions may call, separated by commas."""
    preload: str = ""
    """Galleries that are loaded before the process is ready, separated by commas; `*`: all that fit."""
    poll_seconds: float = Field(0.02, gt=0, le=LONGEST)
    """How often the replica and the worker look for changes."""
    lease_seconds: float = Field(30.0, gt=0, le=LONGEST)
    """How long a worker may hold a chunk without a heartbeat."""

    @field_validator("memory", mode="before")
    @classmethod
    def _whole_size(cls, size: object) -> object:
        # ByteSize reads the beginning of a text alone: 50% and 8,5GiB would be 50 and 8 bytes.
        if isinstance(size, str) and not SIZE.fullmatch(size):
            raise ValueError("a size must be a number with a unit, such as 8GiB, 500MB or 1.5 TiB")
        return size

    @field_validator("pgvector_url")
    @classmethod
    def _url_of_postgresql(cls, url: str) -> str:
        # Otherwise the first gallery that uses it would show what is wrong.
        if url and not _with_driver(url).startswith("postgresql+psycopg://"):
            raise ValueError("must be postgresql://USER:PASSWORD@HOST/DATABASE")
        return url

    @field_validator("api_key", "worker_key")
    @classmethod
    def _hard_to_guess(cls, key: SecretStr | None, info: ValidationInfo) -> SecretStr | None:
        if key is None:
            return None
        text = key.get_secret_value()
        if len(text) < MIN_KEY or not (text.isascii() and text.isprintable()) or text != text.strip():
            raise ValueError(
                f"a key must have at least {MIN_KEY} printable ASCII characters and no space at either end"
            )
        if info.field_name == "worker_key" and key == info.data.get("api_key"):
            raise ValueError("the worker key must differ from the API key, because it permits less")
        return key

    @model_validator(mode="after")
    def _fill_urls(self) -> Self:
        data = self.data.absolute()
        # Names of folders may contain characters with a meaning in URLs.
        path = str(data / "regraft.db").replace("%", "%25").replace("?", "%3F")
        # Setting these two is a part of construction, after which the settings are frozen.
        object.__setattr__(self, "database_url", _with_driver(self.database_url) or f"sqlite:///{path}")
        object.__setattr__(self, "blobs_url", self.blobs_url or f"file://{data / 'blobs'}")
        return self

    @property
    def pgvector(self) -> str:
        """The URL of the PostgreSQL with pgvector for galleries; empty: there is none."""
        return self.pgvector_url or (self.database_url if self.database_url.startswith("postgresql") else "")

    @property
    def execution(self) -> Execution:
        """How encoders are run."""
        return Execution(self.encoder_threads, self.encoder_device)

    @property
    def apis(self) -> frozenset[str]:
        """The base URLs that versions may call."""
        return frozenset(url.strip().rstrip("/") for url in self.embedding_apis.split(",") if url.strip())

    @property
    def preloaded(self) -> tuple[str, ...]:
        """The names of the galleries that are loaded at the start."""
        return tuple(name.strip() for name in self.preload.split(",") if name.strip())

    @property
    def verifying(self) -> Limits:
        """The limits of verifying one archive."""
        return Limits(self.verify_seconds, self.verify_memory_bytes)

    @property
    def versions(self) -> Path:
        """Folder of the registered version folders."""
        return self.data / "versions"

    @property
    def indexes(self) -> Path:
        """Folder of the galleries' sealed segments: a cache, which may be deleted while nothing runs."""
        return self.data / "indexes"

    @property
    def edges(self) -> Path:
        """Folder of the files of edges that were added or fitted."""
        return self.data / "edges"
