"""Engines, which store and search the vectors of one shard: in memory (exact, HNSW, IVF), in pgvector or in Milvus.

Start with `index.engines.base` (the protocol) and `index.engines.memory.segments` (the engine in memory).
"""
