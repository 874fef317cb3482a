"""Sources of imports: one module per kind of source, imported when it is used. `opening.open_source` opens one.

Files: `table` (Parquet, Arrow), `arrays` (npy, fvecs, fbin), `faiss_index`. Databases by their own clients: `pgvector`,
`qdrant`, `chroma`, `lancedb`, `milvus`; by their REST API: `weaviate`, `opensearch`.
"""
