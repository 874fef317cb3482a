"""`World`: the versions of a test, and the output of their encoders and edges for numbered images."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, Self

import numpy as np

from index.edges.graph import Graph, Route
from index.edges.transform import load_transform
from index.encoders.encoder import Encoder
from index.version import Version
from staging.inputs.builders import zip_version


class World:
    """Versions with their encoders and edges. Copying returns the same object."""

    def __init__(self, versions: list[Version], picture: Callable[[int], Any], as_bytes: Callable[..., bytes]) -> None:
        self.versions = {version.name: version for version in versions}
        self.graph = Graph([edge for version in versions for edge in version.edges])
        self.encoders = {version.name: Encoder(version) for version in versions}
        self.everyone = frozenset(self.versions)
        self.as_bytes: Callable[[int], bytes] = lambda number: as_bytes(picture(number))
        self.picture = picture
        self.encode = cache(self._encode)
        self._transform = cache(self._load)

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def with_own_edges(self) -> World:
        """The same versions, with edges that may change."""
        made = copy.copy(self)
        made._transform = cache(made._load)
        return made

    def register(self, http: Any) -> None:
        """Register every version at a service."""
        for version in self.versions.values():
            answer = http.post("/versions", files={"archive": zip_version(version.folder)})
            assert answer.status_code == 201, answer.text

    def route(self, asking: str, held: str, able: frozenset[str] | None = None) -> Route | None:
        """`able`: versions that can embed the query, by default all."""
        return self.graph.route(asking, held, self.everyone if able is None else able)

    def _encode(self, version: str, number: int) -> np.ndarray:
        vector: np.ndarray = self.encoders[version].encode([self.picture(number)]).vectors[0]
        return vector

    def apply(self, edge: Any, vector: np.ndarray) -> np.ndarray:
        mapped: np.ndarray = self._transform(edge.key)(vector[None])[0]
        return mapped

    def _load(self, key: Any) -> Any:
        edge = next(edge for edge in self.graph.edges if edge.key == key)
        return load_transform(edge, self.versions[edge.new].card, self.versions[edge.old].card)

    def best(self, current: str, held: Iterable[str]) -> str:
        """The version, of those an item has, that queries of the current one reach best, by pairwise comparison."""
        best, *others = held
        for name in others:
            if self._better(self.route(current, name), self.route(current, best)):
                best = name
        return best

    def _better(self, one: Any, other: Any) -> bool:
        if one.dual != other.dual:
            return bool(other.dual)
        if not one.dual and one.measured != other.measured:
            return bool(one.measured > other.measured)
        if not one.dual and len(one.edges) != len(other.edges):
            return len(one.edges) < len(other.edges)
        names = list(self.versions)
        return names.index(one.item_version) > names.index(other.item_version)
