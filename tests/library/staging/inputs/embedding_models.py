"""Small embedding models of texts, for tests that supply vectors."""

from __future__ import annotations

import numpy as np

ANIMALS = ("cat", "dog", "owl", "fox", "bee", "ant")
VERBS = ("sleeps", "runs", "eats", "hides")
TEXTS = [f"{animal} {verb} {place}" for animal in ANIMALS for verb in VERBS for place in ("here", "there", "away")]


class TextModel:
    """An embedding model of texts with `dim` numbers: the sum of the words' vectors, rotated by the model.

    Two models embed the same information, so an edge can connect them, like two releases of a provider's model.
    """

    def __init__(self, dim: int, seed: int) -> None:
        self.dim = dim
        self._turn = np.linalg.qr(np.random.default_rng(seed).normal(size=(max(dim, 8), max(dim, 8))))[0][:8, :dim]

    def __call__(self, text: str) -> list[float]:
        words = [np.random.default_rng(list(word.encode())).normal(size=8) for word in text.lower().split()]
        vector = np.sum(words, axis=0) @ self._turn
        return [float(x) for x in vector / np.linalg.norm(vector)]
