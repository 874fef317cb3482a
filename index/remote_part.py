"""The part of a gallery that lies in engines that are servers of their own, or is to."""

from __future__ import annotations

from index.engines.remote_shard import Lock, NumbersOf, RemoteShard
from index.query_plan import ShardKey
from index.shards import Shards


class RemotePart:
    """See the module; thread-safe by the gallery's own locks."""

    def __init__(self, shards: Shards, read: Lock, change: Lock, numbers_of: NumbersOf) -> None:
        """`read`, `change`: the locks of whoever reads the shards and changes them; for `numbers_of` see `settle`."""
        self._shards, self._read, self._change, self._numbers_of = shards, read, change, numbers_of

    def shards(self) -> dict[ShardKey, RemoteShard]:
        """What there is of it."""
        with self._read():
            return self._shards.elsewhere()

    def settle(self) -> bool:
        """Have rows lie where they are to: in the engine once it has them, or here; beside queries and writes.

        False: an engine has lost rows since, or was away when it was asked for them, and what lies where is to be found
        out anew. One caller at a time.
        """
        shards = self.shards().values()
        if not all(shard.settle(self._read, self._change, self._numbers_of) for shard in shards):
            return False
        if any(shard.leaving for shard in shards):
            with self._change():
                self._shards.drop_emptied()
        return True
