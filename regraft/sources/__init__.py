"""Where items come from when they are imported: one module a kind of source, each opened when it is named.

Files: `table` (Parquet, Arrow), `arrays` (npy, fvecs, fbin), `faiss_index`. Live: `pgvector`, `qdrant`, `chroma`,
`lancedb`, `milvus`, by their own clients, which are imported when a source of theirs is opened.
"""
