"""`MilvusServer`: calls to a Milvus server, with the errors of pymilvus and gRPC translated to ours."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import grpc
from pymilvus import MilvusClient
from pymilvus.exceptions import MilvusException

from index.engines.remote.base import EngineUnavailable
from index.engines.remote.circuit_breaker import CircuitBreaker

Found = TypeVar("Found")

# pymilvus logs a traceback for every failed call and also raises.
logging.getLogger("pymilvus").setLevel(logging.CRITICAL)

NO_COLLECTION, NOT_LOADED, NO_PARTITION = 100, 101, 200
"""Error codes of Milvus."""
NOT_CONNECTED = 2
"""Error code of pymilvus."""
CHANNEL = {"grpc.use_local_subchannel_pool": 1, "grpc.max_reconnect_backoff_ms": 1000}
"""By default gRPC reconnects after up to two minutes, for all channels of the process."""


class NotFound(Exception):
    """The server has no such collection or partition."""


class NotLoaded(Exception):
    """The collection must be loaded before it can be read."""


class MilvusServer:
    """See the module. Thread-safe; connects on the first call, and again after `close`."""

    def __init__(self, uri: str, token: str, seconds: float) -> None:
        """`seconds`: the time limit of each call."""
        self.seconds = seconds
        self._uri, self._token, self._breaker = uri, token, CircuitBreaker()
        self.making = threading.Lock()
        """Held while a collection is created: Milvus refuses a second one of the same name."""
        self._lock = threading.Lock()
        self._client: Any = None

    def ask(self, call: Callable[[Any], Found]) -> Found:
        """Run a call of the client.

        Raises:
            EngineUnavailable: the server is unreachable, slow or refuses, or has just failed.
            NotFound, NotLoaded: see these classes.
        """
        with self._breaker.call():
            client = self._connected()
            try:
                return call(client)
            except (grpc.RpcError, grpc.FutureTimeoutError, MilvusException) as error:
                ours = _ours(error)
                if isinstance(ours, EngineUnavailable):
                    raise ours from error
        raise ours  # outside the breaker: the server did answer

    def collections(self) -> list[str]:
        """The names of all collections."""
        names: list[str] = self.ask(lambda client: client.list_collections(timeout=self.seconds))
        return names

    def drop(self, name: str) -> None:
        """Remove a collection; idempotent."""
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
            raise EngineUnavailable("Milvus does not answer: the connection timed out")
        try:
            if self._client is None:
                self._client = self._connect()
            return self._client
        finally:
            self._lock.release()

    def _connect(self) -> Any:
        try:
            # A connection that is not shared within the process, so that it can be closed.
            return MilvusClient(
                self._uri, token=self._token, timeout=self.seconds, dedicated=True, grpc_options=CHANNEL
            )
        except (grpc.RpcError, grpc.FutureTimeoutError, MilvusException) as error:
            raise _ours(error) from error


def _ours(error: Exception) -> Exception:
    """Translate an error of the client."""
    code: Any = getattr(error, "code", None)
    if code in {NO_COLLECTION, NO_PARTITION}:
        return NotFound()
    if code == NOT_LOADED:
        return NotLoaded()
    status = code() if callable(code) else code  # a method in gRPC's errors
    if status == NOT_CONNECTED or not isinstance(status, int):
        how = getattr(status, "name", "it is unreachable or rejects the token")
        return EngineUnavailable(f"Milvus does not answer: {how.lower().replace('_', ' ')}")
    return EngineUnavailable(f"Milvus returned an error: {getattr(error, 'message', type(error).__name__)}")
