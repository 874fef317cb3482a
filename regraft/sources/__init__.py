"""Sources of imports: one module a kind of source, imported when it is used.

Files: `table` (Parquet, Arrow), `arrays` (npy, fvecs, fbin), `faiss_index`. Live: `pgvector`, `qdrant`, `chroma`,
`lancedb`, `milvus`, by their own clients, which are imported when a source of theirs is opened.
"""
