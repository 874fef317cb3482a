"""The query path: what is asked, the gallery in memory, the answer."""
