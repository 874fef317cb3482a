"""`RemotePart`: the shards of a gallery whose rows are in a remote engine or are being moved there."""

from __future__ import annotations

from index.engines.remote.shard import Lock, RemoteShard, SeqsOf
from index.shards import Shards
from index.version import ShardKey


class RemotePart:
    """See the module. Thread-safe: it uses the gallery's locks."""

    def __init__(self, shards: Shards, read: Lock, change: Lock, seqs_of: SeqsOf) -> None:
        """`read`, `change`: the gallery's locks for reading and changing shards; `seqs_of`: slots -> feed numbers."""
        self._shards, self._read, self._change, self._seqs_of = shards, read, change, seqs_of

    def shards(self) -> dict[ShardKey, RemoteShard]:
        """The shards, by key."""
        with self._read():
            return self._shards.remote_shards()

    def settle(self) -> bool:
        """Move rows to the engine or into memory, as configured, without blocking queries and writes.

        Returns False if an engine lost rows, or was unavailable when they were read: the shards must be loaded again.
        One caller at a time.
        """
        shards = self.shards().values()
        if not all(shard.settle(self._read, self._change, self._seqs_of) for shard in shards):
            return False
        if any(shard.is_leaving for shard in shards):
            with self._change():
                self._shards.drop_emptied()
        return True
