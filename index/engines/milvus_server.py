"""`MilvusServer`: calls to a Milvus server, with the client's errors translated to our own.

The client raises its own errors and gRPC's. pymilvus, an extra, is imported with this module, which is imported only
where a gallery uses Milvus.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import grpc
from pymilvus import MilvusClient
from pymilvus.exceptions import MilvusException

from index.engines.circuit_breaker import CircuitBreaker
from index.engines.remote import EngineUnavailable

Found = TypeVar("Found")

# It logs a traceback for every failed call, beside raising.
logging.getLogger("pymilvus").setLevel(logging.CRITICAL)

NO_COLLECTION, NOT_LOADED, NO_PARTITION = 100, 101, 200
"""Error codes of Milvus."""
NOT_CONNECTED = 2
"""Error code of its client."""
CHANNEL = {"grpc.use_local_subchannel_pool": 1, "grpc.max_reconnect_backoff_ms": 1000}
"""gRPC's default retries a server after two minutes, for all channels of the process."""


class NotFound(Exception):
    """The server has no such collection, or no such partition of it."""


class NotLoaded(Exception):
    """The server has the collection, but must load it before it can be read."""


class MilvusServer:
    """See the module. Thread-safe; connects on the first call, and again after `close`."""

    def __init__(self, uri: str, token: str, seconds: float) -> None:
        """`seconds`: the time limit of each call."""
        self.seconds = seconds
        self._uri, self._token, self._breaker = uri, token, CircuitBreaker()
        self.making = threading.Lock()
        """Held while a collection is created: Milvus refuses a second one of a name."""
        self._lock = threading.Lock()
        self._client: Any = None

    def ask(self, call: Callable[[Any], Found]) -> Found:
        """Run a call of the client.

        Raises:
            EngineUnavailable: the server is away, slow or refuses, or has just failed.
            NotFound, NotLoaded: see there.
        """
        with self._breaker.call():
            client = self._connected()
            try:
                return call(client)
            except (grpc.RpcError, grpc.FutureTimeoutError, MilvusException) as error:
                ours = _ours(error)
                if isinstance(ours, EngineUnavailable):
                    raise ours from error
        raise ours  # behind the breaker: a server that says so answers

    def collections(self) -> list[str]:
        """The names of all collections there are."""
        names: list[str] = self.ask(lambda client: client.list_collections(timeout=self.seconds))
        return names

    def drop(self, name: str) -> None:
        """Remove a collection; harmless where there is none."""
        with suppress(NotFound):
            self.ask(lambda client: client.drop_collection(name, timeout=self.seconds))

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _connected(self) -> Any:
        if self._client is not None:
            return self._client
        if not self._lock.acquire(timeout=self.seconds):
            raise EngineUnavailable("Milvus does not answer: connecting takes too long")
        try:
            if self._client is None:
                self._client = self._connect()
            return self._client
        finally:
            self._lock.release()

    def _connect(self) -> Any:
        try:
            # A connection of its own: one that is shared in the process must not be closed.
            return MilvusClient(
                self._uri, token=self._token, timeout=self.seconds, dedicated=True, grpc_options=CHANNEL
            )
        except (grpc.RpcError, grpc.FutureTimeoutError, MilvusException) as error:
            raise _ours(error) from error


def _ours(error: Exception) -> Exception:
    """The error to raise in the place of one of the client's."""
    code: Any = getattr(error, "code", None)
    if code in {NO_COLLECTION, NO_PARTITION}:
        return NotFound()
    if code == NOT_LOADED:
        return NotLoaded()
    status = code() if callable(code) else code  # gRPC's errors have it as a method
    if status == NOT_CONNECTED or not isinstance(status, int):
        how = getattr(status, "name", "it cannot be reached, or does not take the token")
        return EngineUnavailable(f"Milvus does not answer: {how.lower().replace('_', ' ')}")
    return EngineUnavailable(f"Milvus refuses: {getattr(error, 'message', type(error).__name__)}")
