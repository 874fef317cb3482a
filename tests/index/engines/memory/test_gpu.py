"""index.engines.memory.gpu: what a GPU is asked, and answers as of the CPU; FAISS's GPU parts have a stand-in."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import faiss
import numpy as np
import pytest

from index.engines.base import MISSING
from index.engines.config import IndexConfig, IndexKind, Storage
from index.engines.memory import gpu, segments
from index.engines.memory.segments import SegmentedShard
from index.errors import DeviceUnavailable
from index.execution import Device
from index.space import Cosine, Euclidean, Lorentz, Space
from staging.states.small_shards import index_few

ROWS, DIM = 600, 16


def rows(count: int, seed: int) -> np.ndarray:
    return Cosine().normalise(np.random.default_rng(seed).normal(size=(count, DIM)).astype(np.float32))


@dataclass
class StandIn:
    """FAISS's GPU parts on the CPU, with their limits: what may be found is ignored, one thread, 2,048 results."""

    room: int = 10
    """Indexes that fit into its memory."""
    asked: list[tuple[str, int]] = field(default_factory=list)
    """The kind of index and the results wanted, of each search."""
    turn: threading.Lock = field(default_factory=threading.Lock)

    def index_cpu_to_gpu(self, resources: Any, device: int, index: Any) -> Any:
        self.room -= 1
        if self.room < 0:
            raise RuntimeError("Error in GpuMemory: out of memory")
        return OnStandIn(self, faiss.clone_index(index))


class OnStandIn:
    def __init__(self, device: StandIn, index: Any) -> None:
        self._device, self._index = device, index

    def add(self, more: np.ndarray) -> None:
        self._index.add(more)

    def search(self, queries: np.ndarray, k: int, params: Any = None) -> Any:
        assert k <= gpu.MAX_RESULTS
        assert self._device.turn.acquire(blocking=False), "two at a time"
        try:
            self._device.asked.append((type(self._index).__name__, k))
            return self._index.search(queries, k, params=params)
        finally:
            self._device.turn.release()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    made = StandIn()
    monkeypatch.setattr(faiss, "StandardGpuResources", object, raising=False)
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 1)
    monkeypatch.setattr(faiss, "index_cpu_to_gpu", made.index_cpu_to_gpu, raising=False)
    index_few(monkeypatch, 40)
    monkeypatch.setattr(segments, "SEAL_ROWS", 100)
    yield made
    gpu.use(Device.CPU)


def sealed(space: Space, kind: IndexKind, storage: Storage = Storage.FLOAT32) -> SegmentedShard:
    """Two segments and a head, of which some rows are dead; sealed also where it is exact, as with a GPU."""
    shard = SegmentedShard(DIM, space, IndexConfig(kind=kind, storage=storage))
    x = space.normalise(rows(ROWS, seed=1))
    gpu.use(Device.CUDA)
    for start, end in ((0, 300), (300, 580), (580, ROWS)):
        shard.upsert(range(start, end), x[start:end])
        while (job := shard.freeze()) is not None:
            job.run()
            shard.finish(job)
    shard.delete(range(0, ROWS, 50))
    assert [len(one.keys_R) for one in shard.segments] == [300, 280]
    return shard


def searched(shard: SegmentedShard, on: Device, k: int, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    gpu.use(on)
    scores, slots, *_ = shard.search(rows(7, seed=2), k, **options)
    return scores, slots


def check(shard: SegmentedShard, k: int, **options: Any) -> None:
    """The same answer on both, whatever either rounds."""
    (scores, slots), (right, right_slots) = (searched(shard, on, k, **options) for on in (Device.CUDA, Device.CPU))
    np.testing.assert_allclose(scores, right, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(slots, right_slots)


@pytest.mark.parametrize("space", [Cosine(), Euclidean()], ids=["cosine", "l2"])
@pytest.mark.parametrize("kind", [IndexKind.EXACT, IndexKind.IVF, IndexKind.HNSW])
def test_answers_are_those_of_the_cpu(device: StandIn, space: Space, kind: IndexKind) -> None:
    shard = sealed(space, kind)
    device.asked.clear()
    check(shard, 10, exact=True)
    assert {kind for kind, _ in device.asked} == {"IndexFlat"}
    check(shard, 10)
    assert ("IndexIVFFlat" in {kind for kind, _ in device.asked}) == (kind is IndexKind.IVF)
    few = np.arange(ROWS) % 2 == 0
    check(shard, 10, allowed_S=few, exact=True)
    check(shard, 10, allowed_S=few)
    check(shard, 200, exact=True)


def test_what_it_cannot_answer_the_cpu_does(device: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    curved = sealed(Lorentz(0.5), IndexKind.EXACT)
    device.asked.clear()
    check(curved, 10)
    assert device.asked == []

    shard = sealed(Cosine(), IndexKind.EXACT)
    rare = np.zeros(ROWS, np.bool_)
    rare[[1, 2, 303]] = True
    check(shard, 3, allowed_S=rare)
    monkeypatch.setattr(gpu, "MAX_RESULTS", 100)
    device.asked.clear()
    check(shard, 60)
    assert device.asked == []


def test_codes_are_candidates_only(device: StandIn) -> None:
    shard = sealed(Cosine(), IndexKind.IVF, Storage.INT8)
    (scores, slots) = searched(shard, Device.CUDA, 10)
    assert {kind for kind, _ in device.asked} == {"IndexIVFScalarQuantizer"}
    exact, right = searched(shard, Device.CPU, 10, exact=True)
    assert np.mean([len(set(a) & set(b)) / 10 for a, b in zip(slots.tolist(), right.tolist(), strict=True)]) > 0.9
    both = (slots == right) & (slots != MISSING)
    np.testing.assert_allclose(scores[both], exact[both], rtol=1e-5)


def test_where_its_memory_is_full_the_cpu_goes_on_and_the_log_says_so(
    device: StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    shard = sealed(Cosine(), IndexKind.EXACT)
    device.room = 1
    check(shard, 10)
    check(shard, 10)
    assert len([one for one in caplog.records if "not_on_gpu" in str(one.msg)]) == 1


def test_many_threads_take_turns(device: StandIn) -> None:
    shard = sealed(Cosine(), IndexKind.EXACT)
    gpu.use(Device.CUDA)
    wrong: list[BaseException] = []

    def ask() -> None:
        try:
            shard.search(rows(7, seed=3), 10)
        except AssertionError as error:
            wrong.append(error)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize(("built", "said"), [(False, "built without GPUs"), (True, "finds no GPU")])
def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch, built: bool, said: str) -> None:
    if built:
        monkeypatch.setattr(faiss, "StandardGpuResources", object, raising=False)
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 0)
    with pytest.raises(DeviceUnavailable, match=f"{said}.*REGRAFT_INDEX_DEVICE=cpu"):
        gpu.use(Device.CUDA)
    assert gpu.used() is None


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [IndexKind.EXACT, IndexKind.IVF])
def test_a_real_gpu_gives_the_answers_of_the_cpu(kind: IndexKind) -> None:
    try:
        gpu.check_device(Device.CUDA)
    except DeviceUnavailable as error:
        pytest.skip(str(error))
    with pytest.MonkeyPatch.context() as patch:
        index_few(patch, 40)
        patch.setattr(segments, "SEAL_ROWS", 100)
        shard = sealed(Cosine(), kind)
        check(shard, 10)
        check(shard, 10, exact=True)
    gpu.use(Device.CPU)
