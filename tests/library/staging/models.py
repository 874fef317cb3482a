"""Small embedding models of texts, for those who bring vectors."""

from __future__ import annotations

import numpy as np

ANIMALS = ("cat", "dog", "owl", "fox", "bee", "ant")
VERBS = ("sleeps", "runs", "eats", "hides")
TEXTS = [f"{animal} {verb} {place}" for animal in ANIMALS for verb in VERBS for place in ("here", "there", "away")]


class TextModel:
    """An embedding model of texts in `dim` numbers: the sum of its words' vectors, turned into a space of its own.

    Two of them see the same in a text, so that an edge can join them, as with two releases of a provider's model.
    """

    def __init__(self, dim: int, seed: int) -> None:
        self.dim = dim
        self._turn = np.linalg.qr(np.random.default_rng(seed).normal(size=(max(dim, 8), max(dim, 8))))[0][:8, :dim]

    def __call__(self, text: str) -> list[float]:
        words = [np.random.default_rng(list(word.encode())).normal(size=8) for word in text.lower().split()]
        vector = np.sum(words, axis=0) @ self._turn
        return [float(x) for x in vector / np.linalg.norm(vector)]
