"""Versions, spaces, edges, shards and the gallery, on numpy, FAISS and onnxruntime."""
