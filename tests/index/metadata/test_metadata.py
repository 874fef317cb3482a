"""index.metadata.metadata: every filter finds exactly the items that plain Python finds, after any puts and drops."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from index import item_table
from index.item_table import NO_ITEM
from index.metadata import columns
from index.metadata import metadata as module
from index.metadata.filter import parse_filter
from index.metadata.metadata import Item, Metadata
from naive_filters import documents, filters, holds


def found(metadata: Metadata, slots: dict[int, int], filter_json: Any) -> set[int]:
    selected_S = metadata.select(parse_filter(filter_json))
    return {key for key, slot in slots.items() if selected_S[slot]}


def put(metadata: Metadata, slots: dict[int, int], items: dict[int, Any]) -> None:
    texts = {key: Item(json.dumps(item), f"item ü{key}", len(slots)) for key, item in items.items()}
    slots.update(zip(items, metadata.put(list(items), texts).tolist(), strict=True))


@settings(max_examples=60, deadline=None)
@given(items=st.lists(documents, max_size=12), asked=st.lists(filters, min_size=1, max_size=4))
@example(items=[{"a": 2**53}, {"a": 2**53 + 1}, {"a": 2**53 + 2}], asked=[{"field": "a", "range": {"lt": 2**53 + 1}}])
@example(items=[{"a": 2**53 + 1}], asked=[{"field": "a", "eq": 2**53 + 1}, {"field": "a", "eq": 2**53}])
@example(items=[{"a": -(2**53) - 1}], asked=[{"field": "a", "range": {"lt": -(2**53)}}])
@example(items=[{"a": [0, 9]}], asked=[{"field": "a", "range": {"gt": 3, "lt": 5}}])
@example(items=[{"a": True}, {"a": 1}, {"a": 1.0}, {"a": "1"}], asked=[{"field": "a", "eq": 1}])
@example(items=[{"a": "a"}], asked=[{"field": "a", "prefix": "a\x00"}, {"field": "a", "eq": "a\x00"}])
@example(
    items=[{"a": "x\0b"}, {"a": "x\0c"}, {"a": "x"}],
    asked=[{"field": "a", "prefix": "x\0b"}, {"field": "a", "range": {"gt": "x\0b"}}],
)
@example(items=[{}, {"a": None}], asked=[{"field": "a", "eq": None}, {"field": "a", "exists": True}])
@example(
    items=[{"a": None}, {"a": False}, {"a": True}], asked=[{"field": "a", "eq": one} for one in (None, False, True)]
)
@example(
    items=[{"a": 1}, {"a": -(10**400)}, {"a": 10**400}],
    asked=[{"field": "a", "range": {"gt": -(10**401)}}, {"field": "a", "range": {"lt": 10**401}}],
)
@example(items=[{"a": -0.0}], asked=[{"field": "a", "in": [*range(columns.MAX_COMPARED_SINGLY + 1)]}])
def test_a_filter_finds_what_plain_python_finds(items: list[Any], asked: list[Any]) -> None:
    metadata = Metadata()
    slots: dict[int, int] = {}
    put(metadata, slots, dict(enumerate(items)))
    for filter_json in asked:
        assert found(metadata, slots, filter_json) == {n for n, item in enumerate(items) if holds(filter_json, item)}


item_keys = st.integers(0, 9)
steps = st.lists(
    st.tuples(st.just("put"), st.dictionaries(item_keys, documents, max_size=6))
    | st.tuples(st.just("drop"), st.lists(item_keys, max_size=4))
    | st.tuples(st.just("ask"), filters)
    | st.tuples(st.just("enter"), filters),
    max_size=15,
)


@pytest.fixture
def sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweep after every few changes, and order words as often."""
    monkeypatch.setattr(module, "MIN_RETIRED", 2)
    monkeypatch.setattr(columns, "SORT_BATCH", 3)
    monkeypatch.setattr(item_table, "MIN_FREED_BYTES", 20)
    monkeypatch.setattr(module, "COLUMN_BATCH", 3)


@pytest.mark.usefixtures("sweeps")
@settings(max_examples=50, deadline=None)
@given(steps=steps)
def test_filters_stay_exact_under_any_puts_replacements_and_drops(steps: list[tuple[str, Any]]) -> None:
    metadata = Metadata()
    slots: dict[int, int] = {}
    held: dict[int, Any] = {}
    for name, argument in steps:
        if name == "put":
            put(metadata, slots, argument)
            held.update(argument)
        elif name == "drop":
            metadata.remove(argument)
            assert not any(map(metadata.get, argument))
            for key in argument:
                held.pop(key, None)
                slots.pop(key, None)
        elif name == "enter":
            metadata.build_columns(parse_filter(argument))
        else:
            assert found(metadata, slots, argument) == {key for key, item in held.items() if holds(argument, item)}
    assert len(set(slots.values())) == len(slots), "two items share a slot"
    keys, shown = metadata.look_up(np.array([[*slots.values(), NO_ITEM]]), full=False)
    assert keys.tolist() == [[*slots, NO_ITEM]]
    assert {key: (json.loads(one.metadata), one.id) for key, one in shown.items()} == {
        key: (item, f"item ü{key}") for key, item in held.items()
    }
    for key, item in held.items():
        assert found(metadata, slots, {"field": "a", "exists": True}) >= ({key} if "a" in item else set())


@pytest.mark.usefixtures("sweeps")
@pytest.mark.parametrize("removed", [True, False])
def test_slots_are_used_again(removed: bool) -> None:
    metadata, same = Metadata(), [1, 2, 3]

    for _ in range(10):
        metadata.put(same, dict.fromkeys(same, Item("{}", "one", 1)))
        metadata.remove(same if removed else ())

    assert metadata.slot_count() < 3 * len(same)


@pytest.mark.usefixtures("sweeps")
def test_what_was_found_stays_as_it_was_whatever_is_written_later() -> None:
    metadata = Metadata()
    before = {key: Item(json.dumps({"a": key}), f"item {key}", key) for key in range(9)}
    slots = metadata.put(list(before), before)
    keys, shown = metadata.look_up(slots.reshape(3, 3), full=True)
    metadata.remove(range(3))
    metadata.put(range(3, 12), {key: Item(json.dumps({"b": key}), "other", 99) for key in range(3, 12)})

    assert keys.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert dict(shown) == before


def test_an_item_that_is_called_otherwise_is_shown_so() -> None:
    metadata = Metadata()
    metadata.put([1, 2], {1: Item('{"a": 1}', "one", 1)})
    slots = metadata.put([1, 2], {1: Item('{"a": 1}', "first", 3), 2: Item("{}", "second", 4)})

    assert [metadata.get(key) for key in (1, 2)] == [Item('{"a": 1}', "first", 3), Item("{}", "second", 4)]
    assert metadata.select(parse_filter({"field": "a", "eq": 1}))[slots].tolist() == [True, False]


def test_what_is_loaded_is_what_was_kept() -> None:
    kept, loaded = Metadata(), Metadata()
    kept.put([7, 8], {7: Item('{"a": 1}', "seven", 3), 8: Item('{"a": 2}', "eight", 4)})

    slots = loaded.load(kept.contents())
    without_columns = loaded.bytes()

    assert [loaded.get(key) for key in (7, 8)] == [kept.get(key) for key in (7, 8)]
    assert loaded.select(parse_filter({"field": "a", "eq": 2}))[slots].tolist() == [False, True]
    assert loaded.bytes() > without_columns


def test_many_items_of_every_kind() -> None:
    """Enough items for columns to grow, for the vocabulary to shrink, and for both ways to mark slots."""
    generator = np.random.default_rng(0)
    metadata = Metadata()
    slots: dict[int, int] = {}

    def made(n: int) -> dict[str, Any]:
        return {
            "shop": {"city": f"city {generator.integers(5)}"},
            "price": float(generator.integers(1000)) / 8,
            "sku": f"AB-{n:05d}",
            **({"tags": [f"t{t}" for t in generator.integers(0, 20, n % 4)]} if n % 4 else {}),
            **({"rare": True} if n % 500 == 0 else {}),
        }

    held = {n: made(n) for n in range(5000)}
    put(metadata, slots, held)
    for round_ in range(3):
        changed = {n: made(n + 3000 * round_) for n in range(round_, 5000, 2)}
        held.update(changed)
        put(metadata, slots, changed)
        gone = list(held)[:: 7 + round_]
        metadata.remove(gone)
        for key in gone:
            del held[key], slots[key]
    asked: list[Any] = [
        {"field": "shop.city", "eq": "city 3"},
        {"field": "shop.city", "in": ["city 1", "city 2", "nowhere"]},
        {"field": "shop", "exists": True},
        {"field": "shop", "eq": "city 3"},
        {"field": "price", "range": {"gte": 10, "lt": 60.5}},
        {"field": "price", "eq": 12},
        {"field": "price", "in": [n / 4 for n in range(300)]},
        {"field": "sku", "prefix": "AB-07"},
        {"field": "sku", "range": {"gt": "AB-04", "lte": "AB-08"}},
        {"field": "tags", "in": ["t3", "t4"]},
        {"field": "tags", "exists": False},
        {"not": {"field": "tags", "eq": "t3"}},
        {"field": "rare", "eq": True},
        {"and": [{"field": "price", "range": {"lt": 50}}, {"not": {"field": "shop.city", "eq": "city 0"}}]},
    ]
    for filter_json in asked:
        expected = {key for key, item in held.items() if holds(filter_json, item)}
        assert found(metadata, slots, filter_json) == expected, filter_json
        assert filter_json.get("field") == "shop" or 0 < len(expected) < len(held), "this filter tests nothing"


def test_unchanged_metadata_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = Metadata()
    texts = {1: Item('{"a": 1}'), 2: Item('{"a": 2}')}
    slots = metadata.put([1, 2], texts)
    monkeypatch.setattr(module, "json", None)
    np.testing.assert_array_equal(metadata.put([2, 1], texts), slots[::-1])
    np.testing.assert_array_equal(metadata.put([1], {}), slots[:1])


def test_items_are_read_once_for_each_key_that_filters_look_at_and_that_any_item_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    metadata = Metadata()
    slots: dict[int, int] = {}
    put(metadata, slots, {1: {"a": 1, "b": {"c": 2}}, 2: {"a": 2}})
    read, parsed = [], module._parsed
    monkeypatch.setattr(module, "_parsed", lambda text: read.append(text) or parsed(text))

    for asked, reads in (({"a"}, 1), ({"a", "none"}, 1), ({"none"}, 1), ({"b", "a"}, 2), ({"b"}, 2)):
        where = {"or": [{"field": field, "exists": True} for field in sorted(asked)]}
        assert found(metadata, slots, where) == {key for key, names in ((1, {"a", "b"}), (2, {"a"})) if names & asked}
        assert len(read) == reads

    put(metadata, slots, {3: {"none": 1}, 2: {"b": {"c": 3}}})
    read.clear()
    assert found(metadata, slots, {"field": "b.c", "eq": 3}) == {2}
    assert found(metadata, slots, {"field": "a", "exists": True}) == {1}
    assert not read
    assert found(metadata, slots, {"field": "none", "exists": True}) == {3}


def test_items_without_metadata_hold_an_empty_object() -> None:
    metadata = Metadata()
    slots: dict[int, int] = {}
    slots.update(zip([5, 6], metadata.put([5, 6], {6: Item('{"a": 1}')}).tolist(), strict=True))
    assert found(metadata, slots, {"field": "a", "exists": False}) == {5}
    assert found(metadata, slots, {"not": {"field": "b", "eq": 1}}) == {5, 6}


@pytest.mark.usefixtures("sweeps")
def test_slots_and_words_are_used_again() -> None:
    metadata = Metadata()
    slots: dict[int, int] = {}
    for n in range(300):
        put(metadata, slots, {7: {"name": f"word {n}", f"field {n}": 1}})
    assert len(metadata.select(parse_filter({"field": "name", "eq": "word 299"}))) < 10
    assert found(metadata, slots, {"field": "name", "eq": "word 299"}) == {7}
    assert len(metadata._root.children) < 10
    words = metadata._root.children["name"].strings
    assert 3 * len(words._sorted) + len(words._unsorted) == len(words._code_of) < 10


@pytest.mark.usefixtures("sweeps")
@pytest.mark.parametrize(
    ("path", "document"),
    [
        ("a", lambda w: {"a": w}),
        ("a.b", lambda w: {"a": {"b": w}}),
        ("a.b.c", lambda w: {"a": [{"b": {"c": [w, "x"]}}]}),
    ],
)
def test_words_are_found_by_their_order_whatever_becomes_of_others(path: str, document: Callable[[str], Any]) -> None:
    generator = np.random.default_rng(0)
    metadata, slots, held = Metadata(), dict[int, int](), dict[int, Any]()
    for _ in range(6):
        words = {key: f"w{generator.integers(1000):03d}" for key in generator.integers(0, 40, 30).tolist()}
        changed = {key: document(word) for key, word in words.items()}
        put(metadata, slots, changed)
        held.update(changed)
        some = next(iter(words.values()))
        tests: list[Any] = [{"eq": some}, {"in": [some, "w"]}, *({"prefix": p} for p in ("w2", "", "\U0010ffff"))]
        tests += [{"range": {end: bound}} for end in ("lt", "lte", "gt", "gte") for bound in (some, "w250", "w5")]
        for test in tests:
            asked = {"field": path, **test}
            assert found(metadata, slots, asked) == {key for key, item in held.items() if holds(asked, item)}, asked


def test_metadata_nested_deeper_than_python_may_call() -> None:
    depth = 900
    text = '{"a": ' * depth + "1" + "}" * depth
    metadata = Metadata()
    (slot,) = metadata.put([1], {1: Item(text)})
    assert metadata.select(parse_filter({"field": ["a"] * 100, "exists": True}))[slot]
    metadata.remove([1])


def test_a_long_string_among_many_short_ones_takes_no_more_than_its_own_room() -> None:
    """As NumPy's fixed-width strings these would take 40 GB."""
    metadata = Metadata()
    texts = [f"{n}" for n in range(10_000)] + ["x" * 1_000_000]
    slots = metadata.put(range(10_001), {n: Item(json.dumps({"a": text})) for n, text in enumerate(texts)})
    assert metadata.select(parse_filter({"field": "a", "prefix": "xx"}))[slots].sum() == 1


def test_values_belong_to_their_items_after_a_sweep() -> None:
    """Every item has one number and one word, so entries and slots are the same until the first ones are swept out."""
    metadata, slots = Metadata(), dict[int, int]()
    put(metadata, slots, {key: {"n": key, "word": f"w{key}"} for key in range(3000)})
    metadata.remove(range(1600))
    for key in (1600, 2000, 2999):
        live = {other: slot for other, slot in slots.items() if other >= 1600}
        assert found(metadata, live, {"field": "n", "eq": key}) == {key}
        assert found(metadata, live, {"field": "word", "eq": f"w{key}"}) == {key}


def test_four_times_as_many_words_at_once_take_four_times_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a sweep gives them, while queries stand still."""
    monkeypatch.setattr(columns, "SORT_BATCH", 8)

    def seconds(count: int) -> float:
        words, began = [f"word {n}" for n in range(count)], time.process_time()
        column = columns.StringColumn()
        column.add(range(count), words)
        column.flush()
        return time.process_time() - began

    assert min(seconds(40_000) for _ in range(3)) < 10 * min(seconds(10_000) for _ in range(3))
