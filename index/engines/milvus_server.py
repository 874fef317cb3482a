"""`MilvusServer`: calls to a server of Milvus, and what its client says of failures, in our words.

The client raises its own errors and gRPC's. pymilvus is imported with this module, which is read where a gallery lies
in Milvus: it is an extra.
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

# It prints a traceback for every call that fails, beside raising.
logging.getLogger("pymilvus").setLevel(logging.CRITICAL)

NO_COLLECTION, NOT_LOADED, NO_PARTITION = 100, 101, 200
"""Codes that Milvus answers with."""
NOT_CONNECTED = 2
"""What its client says itself."""
CHANNEL = {"grpc.use_local_subchannel_pool": 1, "grpc.max_reconnect_backoff_ms": 1000}
"""gRPC's own would try a server again after two minutes, for all channels of the process."""


class NotThere(Exception):
    """The server knows no such collection, or no such part of it."""


class NotLoaded(Exception):
    """The server has the collection, and has to load it before it can be read."""


class MilvusServer:
    """See the module. Thread-safe; connects when it is first asked, and again after `close`."""

    def __init__(self, uri: str, token: str, seconds: float) -> None:
        """`seconds`: the time limit of each call."""
        self.seconds = seconds
        self._uri, self._token, self._breaker = uri, token, CircuitBreaker()
        self.making = threading.Lock()
        """Held by whoever creates collections: Milvus refuses a second one of a name."""
        self._lock = threading.Lock()
        self._client: Any = None

    def ask(self, call: Callable[[Any], Found]) -> Found:
        """What a call of the client gives.

        Raises:
            EngineUnavailable: the server is away, slow or refuses, or has just failed.
            NotThere, NotLoaded: see there.
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
        with suppress(NotThere):
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
            # Its own connection: one that is shared in the process nobody may close.
            return MilvusClient(
                self._uri, token=self._token, timeout=self.seconds, dedicated=True, grpc_options=CHANNEL
            )
        except (grpc.RpcError, grpc.FutureTimeoutError, MilvusException) as error:
            raise _ours(error) from error


def _ours(error: Exception) -> Exception:
    """The error to raise in the place of one of the client's."""
    code: Any = getattr(error, "code", None)
    if code in {NO_COLLECTION, NO_PARTITION}:
        return NotThere()
    if code == NOT_LOADED:
        return NotLoaded()
    status = code() if callable(code) else code  # gRPC's errors have it as a method
    if status == NOT_CONNECTED or not isinstance(status, int):
        how = getattr(status, "name", "it cannot be reached, or does not take the token")
        return EngineUnavailable(f"Milvus does not answer: {how.lower().replace('_', ' ')}")
    return EngineUnavailable(f"Milvus refuses: {getattr(error, 'message', type(error).__name__)}")
