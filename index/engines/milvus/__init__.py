"""Milvus as a remote engine; imports pymilvus, an extra, so it is imported only if a gallery uses it."""
