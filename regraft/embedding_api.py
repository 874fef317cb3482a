"""`ProviderApi`: create a version whose texts are embedded by a provider's API (`regraft version create --api`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from index.creation.probes import SENTENCES, write_text_probe
from index.space import space_from_json
from index.version import TEXT_PROBE, Card, EmbeddingApi, Version
from index.version_folder.card import parse_api
from service.registry.encoders.embedding_api import ApiEncoder, ProviderFault, ProviderUnavailable

LARGEST = 0.02
"""Largest legal difference between two calls with the same text, relative to the largest number: providers are not
deterministic."""


@dataclass(frozen=True)
class ProviderApi:
    """Texts embedded by `api`, after the prefixes `prompts`, as vectors of `dim` numbers in `space`."""

    api: EmbeddingApi
    dim: int
    space: Mapping[str, Any] = field(default_factory=lambda: {"kind": "cosine"})
    prompts: Mapping[str, str] = field(default_factory=dict)

    def write(self, folder: Path, name: str) -> Card:
        """Write the probe, the provider's answer for later comparisons; skipped if the provider is unavailable.

        Raises:
            InvalidVersionFolder: a field of the API is not legal.
            ProviderFault: its vectors do not fit the card, or differ from call to call.
            InvalidText: it refuses plain sentences.
        """
        api = parse_api({key: value for key, value in asdict(self.api).items() if value is not None}, "the API", "")
        space = space_from_json(dict(self.space))
        card = Card(name, self.dim, space.as_json(), method="api", prompts=self.prompts, api=api)
        encoder = ApiEncoder(Version(card, folder), [api.url])
        try:
            difference = self._probe(folder, encoder)
        except ProviderFault:
            raise
        except ProviderUnavailable as error:
            return Card(**{**vars(card), "metrics": {"probe": {"checked": False, "why": error.message}}})
        finally:
            encoder.close()
        told = {"checked": True, "inputs": len(SENTENCES), "largest_difference": difference, "tokens": encoder.tokens}
        return Card(**{**vars(card), "metrics": {"probe": told}})

    def _probe(self, folder: Path, encoder: ApiEncoder) -> float:
        """Embed all texts, all in reverse order, and one alone; write the probe. Returns the largest difference."""
        texts = [encoder.prepare(text) for text in SENTENCES]
        first, second = encoder.vectors(texts), encoder.vectors(texts[::-1])[::-1]
        alone = encoder.vectors(texts[:1])
        difference = max(float(np.abs(one).max()) for one in (first - second, first[:1] - alone)) / np.abs(first).max()
        if not difference <= LARGEST:
            raise ProviderFault(
                f"{encoder.api.url} embeds the same texts differently in another order or alone: by {difference:.2g} "
                f"of their largest number; at most {LARGEST} is legal"
            )
        (folder / TEXT_PROBE).parent.mkdir(exist_ok=True)
        write_text_probe(folder, texts[0], first[0])
        return float(difference)
