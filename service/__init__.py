"""The retrieval service: HTTP, SQL, the replica and the worker."""

import os

# FAISS reads this once, when it is loaded: several queries at a time, one thread each, beat one query on all threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
