"""Versions, spaces, edges, shards and the gallery, on numpy, FAISS and onnxruntime.

Start with `index.version` (the vocabulary), then read a query from `index.gallery`.
"""
