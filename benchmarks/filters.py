"""The cost of a metadata filter: the same exact query with and without it, side by side in one run.

    python benchmarks/filters.py --items 100000 --items 1000000 --repeats 30

Prints one table per size: for each operator and selectivity the median processor time of a filtered query divided by
that of an unfiltered one (one query, then a batch of 64 for one operator), wall-clock percentiles of both, and the
memory of five ordinary fields. Vectors are 128 random numbers of unit length, k is 10, one thread. An `in` lists up to
1,000 values.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # read when FAISS is imported

import numpy as np
from command_line import Count, Counts, run_main

from index.engines.memory.flat import FlatShard
from index.metadata.filter import Filter, parse_filter
from index.metadata.metadata import Item, Metadata
from index.space import Cosine, Vectors

ITEMS = [100_000, 1_000_000]
DIM, K, BATCH = 128, 10, 64
SHARES = {0.0001: "0.01 %", 0.01: "1 %", 0.1: "10 %", 0.5: "50 %", 1.0: "100 %"}
BRANDS = 1_000
BLOCK = 10_000


def document(rank: int, items: int) -> dict[str, Any]:
    """The metadata of the item that is number `rank` in a random order; every operator can select a share of ranks."""
    within = [name for share, name in SHARES.items() if rank < share * items]
    return {
        "class": {name: "in" if name in within else "out" for name in SHARES.values()},
        "some": dict.fromkeys(within, 1),
        "number": rank,
        "sku": "k:" + "a" * len(within) + f"-{rank:07d}",
        "date": f"2026-01-{rank:09d}",
        "brand": f"brand {rank * BRANDS // items}",
        "bin": rank * BRANDS // items,
        "tags": [*within, "z"],
    }


def filters(share: float, items: int) -> dict[str, Any]:
    """One filter an operator, each of which passes exactly this share of the items."""
    name, below = SHARES[share], round(share * items)
    number = {"field": "number", "range": {"lt": below}}
    everyone = {"field": "tags", "eq": "z"}
    return {
        "eq": {"field": ["class", name], "eq": "in"},
        "eq, arrays": {"field": "tags", "eq": name},
        "in, words": {"field": "brand", "in": [f"brand {n}" for n in range(max(1, round(share * BRANDS)))]},
        "in, numbers": {"field": "bin", "in": list(range(max(1, round(share * BRANDS))))},
        "range, numbers": number,
        "range, words": {"field": "date", "range": {"lt": f"2026-01-{below:09d}"}},
        "prefix": {"field": "sku", "prefix": "k:" + "a" * (len(SHARES) - list(SHARES).index(share))},
        "exists": {"field": ["some", name], "exists": True},
        "and": {"and": [number, everyone]},
        "or": {"or": [number, {"field": "number", "eq": 0}]},
        "not": {"not": {"field": "number", "range": {"gte": below}}},
    }


def times(work: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds of processor, and of the clock on the wall."""
    wall, processor = time.perf_counter(), time.thread_time()
    work()
    return 1000 * (time.thread_time() - processor), 1000 * (time.perf_counter() - wall)


def side_by_side(one: Callable[[], object], other: Callable[[], object], repeats: int) -> str:
    """Ratio of median processor times, which other programs disturb least; then p50 / p99 of each on the wall."""
    pairs = np.array([(times(one), times(other)) for _ in range(repeats)])
    plain, filtered = np.median(pairs[:, :, 0], axis=0)
    (plain_50, filtered_50), (plain_99, filtered_99) = np.percentile(pairs[:, :, 1], [50, 99], axis=0)
    walls = f"{plain_50:.1f} / {plain_99:.1f} | {filtered_50:.1f} / {filtered_99:.1f} |"
    return f"{filtered / plain:.2f} | {plain:.1f} | {filtered:.1f} | {walls}"


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def memory(items: int) -> str:
    """Bytes an item takes with five fields: two of few words, a price, a time, a word of its own."""
    before, metadata = resident_bytes(), Metadata()
    started = time.thread_time()
    for start in range(0, items, BLOCK):
        block = {
            n: Item(
                json.dumps(
                    {
                        "kind": f"k{n % 9}",
                        "brand": f"b{n % 997}",
                        "price": n * 0.37,
                        "time": 1.7e9 + n,
                        "sku": f"AB-{n:08d}",
                    }
                ),
                f"item-{n:08d}",
                n,
            )
            for n in range(start, start + BLOCK)
        }
        metadata.put(list(block), block)
    for key in ("kind", "brand", "price", "time", "sku"):
        metadata.select(parse_filter({"field": key, "exists": True}))
    took = (time.thread_time() - started) / items
    return f"{(resident_bytes() - before) / items:.0f} bytes and {took * 1e6:.0f} us of processor an item to put"


def measure(items: int, repeats: int) -> None:
    print(f"\n{items:,} items; five fields: {memory(items)}\n")
    generator = np.random.default_rng(0)
    ranks = generator.permutation(items).tolist()
    metadata, shard = Metadata(), FlatShard(DIM, Cosine())
    for start in range(0, items, BLOCK):
        keys = list(range(start, min(start + BLOCK, items)))
        slots = metadata.put(keys, {key: Item(json.dumps(document(ranks[key], items))) for key in keys})
        vectors = Cosine().normalise(generator.standard_normal((len(keys), DIM), dtype=np.float32))
        shard.upsert(keys, vectors, slots)
    queries = Cosine().normalise(generator.standard_normal((BATCH, DIM), dtype=np.float32))

    def search_filtered(some: Vectors, where: Filter) -> None:
        shard.search(some, K, metadata.select(where))

    print(
        "| operator | passes | queries | ratio | unfiltered ms | filtered ms | wall unfiltered p50 / p99 | filtered |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for share, name in SHARES.items():
        for operator, filter_json in filters(share, items).items():
            where = parse_filter(filter_json)
            passed = int(metadata.select(where)[:items].sum())
            for count in (1, BATCH) if operator == "range, numbers" else (1,):
                some = queries[:count]
                line = side_by_side(
                    partial(shard.search, some, K),
                    partial(search_filtered, some, where),
                    repeats if count == 1 else max(3, repeats // 10),
                )
                print(
                    f"| {operator} | {name if passed == round(share * items) else passed} | {count} | {line}",
                    flush=True,
                )


def main(items: Counts = ITEMS, repeats: Count = 30) -> None:
    for count in items:
        measure(count, repeats)


if __name__ == "__main__":
    run_main(main)
