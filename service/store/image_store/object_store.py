"""Open the store of blobs through fsspec: a folder on this machine, or an object store over the network.

S3 is accessed through s3fs (`regraft[s3]`), with keys, endpoint and region from the usual environment variables
(AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL_S3, ...). If it does not answer, it raises within seconds, since requests wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import fsspec

from index.errors import RegraftError

FOLDERS = "folders/"
"""The prefix of keys of packed folders; keys of images begin with the number of a gallery."""
VECTOR_FILES = "vectors/"
"""The prefix of keys of files of vectors."""

CONNECT_SECONDS, READ_SECONDS, ATTEMPTS = 3, 10, 3
"""Limits of a request to S3."""
CONNECTIONS = 64
"""Most connections of one process to S3; a request waits without limit for a free one."""
S3 = {
    # Other processes may remove what this one has listed.
    "use_listings_cache": False,
    # Otherwise the size of each image would be requested before it is read.
    "max_concurrency": 1,
    "config_kwargs": {
        "max_pool_connections": CONNECTIONS,
        "connect_timeout": CONNECT_SECONDS,
        "read_timeout": READ_SECONDS,
        "retries": {"mode": "standard", "total_max_attempts": ATTEMPTS},
    },
}
OPTIONS: dict[str, dict[str, Any]] = {"s3": S3, "s3a": S3}
"""Protocol -> options of fsspec."""
TIMEOUTS = {"ConnectTimeoutError", "ReadTimeoutError"}
"""Names of botocore's errors."""


class UnusableStore(RegraftError):
    """REGRAFT_BLOBS_URL is not a supported store, or its Python package is not installed."""

    code = "unusable_store"


def open_store(url: str) -> tuple[Any, str]:
    """The file system of fsspec for a URL, and the path in it. Raises UnusableStore."""
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
        if ":" in (bucket := str(root).partition("/")[0]) and not bucket.startswith("arn:"):
            # The client would take them for a part of the bucket's name, which messages show.
            raise UnusableStore(
                "REGRAFT_BLOBS_URL must hold no keys: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY instead"
            )
        store.retries = 1  # botocore retries already: the attempts of both would multiply
    return store, str(root).rstrip("/")


@cache
def _session() -> Any:
    """A session that sends bodies at once, without `Expect: 100-continue`.

    botocore would first wait for the server's approval, and if S3 hangs, none of the timeouts above would end that.
    """
    from aiobotocore.session import AioSession
    from botocore.handlers import add_expect_header

    session = AioSession()
    session.unregister("before-call.s3", add_expect_header)
    return session


def is_remote(url: str) -> bool:
    """Whether a store is accessed over the network, that is, is not a folder on this machine."""
    return "file" not in fsspec.core.get_filesystem_class(url.partition("://")[0] if "://" in url else "file").protocol


def is_timeout(error: OSError) -> bool:
    """Whether a store did not answer in time, so that another request would take as long."""
    return type(error).__name__ in TIMEOUTS


@contextmanager
def as_os_errors() -> Iterator[None]:
    """Turn every exception into an OSError, since stores over the network raise their own types."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
