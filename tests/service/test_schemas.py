from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from index.errors import InvalidVector
from index.space import Cosine, Euclidean
from service import schemas
from service.errors import InvalidBody
from service.schemas import check_embeddings, take_object


def test_an_unknown_field_is_named_with_the_legal_ones() -> None:
    with pytest.raises(InvalidBody, match="unknown field 'x'; legal: a, b") as caught:
        take_object({"a": 1, "x": 2}, {"a", "b"}, "/items/3")

    assert caught.value.pointer == "/items/3/x"


def test_embeddings_become_valid_vectors() -> None:
    given = check_embeddings([[3, 4], [0.5, 0]], 2, Cosine(), "/embeddings", "v1")

    np.testing.assert_allclose(given, [[0.6, 0.8], [1, 0]])
    assert given.dtype == np.float32
    assert given.flags.c_contiguous
    np.testing.assert_array_equal(check_embeddings([[3, 4]], 2, Euclidean(), "", "v1"), [[3, 4]])
    large = check_embeddings([[10**30, 0.5], [2**64, 0], [0, -(2**63)]], 2, Cosine(), "", "v1")
    np.testing.assert_allclose(large, [[1, 0], [1, 0], [0, -1]], atol=1e-9)


@pytest.mark.parametrize(
    ("value", "pointer"),
    [
        ([[1, 2], [1, 2, 3]], "/e/1"),
        ([[1, 2], [True, 2]], "/e/1"),
        ([[1, 2], ["1", 2]], "/e/1"),
        ([[1, 2], "12"], "/e/1"),
        ([[1, 2], 3], "/e/1"),
        ([[1, 2], {1: 1, 2: 2}], "/e/1"),
        ([[1, 2], [[1], [2]]], "/e/1"),
        ([[1, 2], [None, 2]], "/e/1"),
        ([[1, 2], [float("inf"), 2]], "/e/1"),
        ([[1, 2], [0, 0]], "/e/1"),
        ([[1, 2], [10**400, 1]], "/e/1"),
        ([[10**30, 0.5], [1, "2"]], "/e/1"),
        ([[[1, 2]]], "/e/0"),
        ([""], "/e/0"),
        ([], "/e"),
        ("ab", "/e"),
        (None, "/e"),
    ],
    ids=str,
)
def test_the_first_bad_embedding_is_named(value: Any, pointer: str) -> None:
    with pytest.raises(InvalidVector) as caught:
        check_embeddings(value, 2, Cosine(), "/e", "v1")

    assert caught.value.pointer == pointer


def test_an_embedding_of_another_length_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = 0

    def watched(rows: Any, *rest: Any) -> Any:
        nonlocal longest
        longest = max([longest, *map(len, rows)])
        return made(rows, *rest)

    made = np.array
    monkeypatch.setattr("service.schemas.np.array", watched)
    with pytest.raises(InvalidVector):
        check_embeddings([[1, 2], [1] * 1000], 2, Cosine(), "/e", "v1")

    assert longest <= 2


@pytest.mark.parametrize("limit", ["le=MOST)", r'r"^[^\x00]*$"'])
def test_limits_of_bodies_and_paths_are_spelled_here_and_nowhere_else(limit: str) -> None:
    service = Path(schemas.__file__).parent

    assert {path.name for path in service.rglob("*.py") if limit in path.read_text()} == {"schemas.py"}
