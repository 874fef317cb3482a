"""The shards of a gallery whose rows are in remote engines, or move there."""

from __future__ import annotations

from index.engines.remote_shard import Lock, RemoteShard, SeqsOf
from index.shards import Shards
from index.version import ShardKey


class RemotePart:
    """See the module; thread-safe by the gallery's own locks."""

    def __init__(self, shards: Shards, read: Lock, change: Lock, seqs_of: SeqsOf) -> None:
        """`read`, `change`: the gallery's locks for reading and changing the shards; for `seqs_of` see `settle`."""
        self._shards, self._read, self._change, self._numbers_of = shards, read, change, seqs_of

    def shards(self) -> dict[ShardKey, RemoteShard]:
        """The shards, by key."""
        with self._read():
            return self._shards.remote_shards()

    def settle(self) -> bool:
        """Move rows to where the configuration puts them, an engine or memory, beside queries and writes.

        False: an engine has lost rows, or was away when it was asked for them, so the shards must be loaded again. One
        caller at a time.
        """
        shards = self.shards().values()
        if not all(shard.settle(self._read, self._change, self._numbers_of) for shard in shards):
            return False
        if any(shard.is_leaving for shard in shards):
            with self._change():
                self._shards.drop_emptied()
        return True
