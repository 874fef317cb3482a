"""A query over the shards of a gallery: its plan, the search of each shard, and one merged list.

Start with `index.query.query_plan` (which shards, by which routes) and `index.query.merge` (one list).
"""
