"""The retrieval service: HTTP, SQL, the replica and the worker."""

import os

# FAISS reads this once, when it is loaded. Concurrent queries with one thread each beat single queries on all threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
