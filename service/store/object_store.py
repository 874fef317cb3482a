"""Where blobs lie: a folder of this machine, or an object store over the network, through fsspec.

S3 through s3fs (`regraft[s3]`): keys, endpoint and region come from the environment that every S3 client reads
(AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL_S3, ...). One that does not answer raises within seconds, for requests wait for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import fsspec

from index.errors import RegraftError

FOLDERS = "folders/"
"""What the keys of packed folders begin with; those of images with the number of a gallery."""
VECTOR_FILES = "vectors/"
"""What the keys of files of vectors begin with."""

CONNECT_SECONDS, READ_SECONDS, ATTEMPTS = 3, 10, 3
"""Of a request to S3."""
CONNECTIONS = 64
"""To S3, of one process; a request that finds none free waits without limit."""
S3 = {
    # Another process removes what this one has listed.
    "use_listings_cache": False,
    # Else the size of each image would be requested before it is read.
    "max_concurrency": 1,
    "config_kwargs": {
        "max_pool_connections": CONNECTIONS,
        "connect_timeout": CONNECT_SECONDS,
        "read_timeout": READ_SECONDS,
        "retries": {"mode": "standard", "total_max_attempts": ATTEMPTS},
    },
}
OPTIONS: dict[str, dict[str, Any]] = {"s3": S3, "s3a": S3}
"""By protocol."""
TIMEOUTS = {"ConnectTimeoutError", "ReadTimeoutError"}
"""What botocore raises."""


class UnusableStore(RegraftError):
    """REGRAFT_BLOBS_URL is not a supported store, or its Python package is not installed."""

    code = "unusable_store"


def open_store(url: str) -> tuple[Any, str]:
    """A file system of fsspec and the path in it. Raises UnusableStore."""
    protocol = url.partition("://")[0]
    try:
        options = {**OPTIONS[protocol], "session": _session()} if protocol in OPTIONS else {}
        store, root = fsspec.core.url_to_fs(url, **options)
    except (ImportError, ValueError) as error:
        how = ": pip install 'regraft[s3]'" if protocol in OPTIONS else ""
        raise UnusableStore(f"REGRAFT_BLOBS_URL cannot be opened ({error}){how}") from error
    if protocol in OPTIONS:
        if not str(root).strip("/"):
            raise UnusableStore(f"REGRAFT_BLOBS_URL {url!r} must have a bucket, such as s3://bucket/prefix")
        store.retries = 1  # botocore tries again already: both together would multiply
    return store, str(root).rstrip("/")


@cache
def _session() -> Any:
    """A session that sends bodies at once, without `Expect: 100-continue`.

    botocore would first wait for the server's consent, and none of the timeouts above ends that wait if S3 hangs.
    """
    from aiobotocore.session import AioSession
    from botocore.handlers import add_expect_header

    session = AioSession()
    session.unregister("before-call.s3", add_expect_header)
    return session


def is_remote(url: str) -> bool:
    """Whether a store is over the network, not a folder of this machine."""
    return "file" not in fsspec.core.get_filesystem_class(url.partition("://")[0] if "://" in url else "file").protocol


def is_timeout(error: OSError) -> bool:
    """Whether a store did not answer in time: another request would take as long."""
    return type(error).__name__ in TIMEOUTS


@contextmanager
def as_os_errors() -> Iterator[None]:
    """Turn every exception into an OSError: stores over the network have types of their own."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
