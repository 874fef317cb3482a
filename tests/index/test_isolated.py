"""index.isolated: whatever a model does, whoever verifies it goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from index import isolated
from index.errors import InvalidVersionFolder
from index.isolated import Limits, check_edge_isolated, verify_isolated
from index.version import EDGE_MODEL, ENCODER, EdgeKind, Version
from index.version_folder.folder import load_version, write_card

MakeVersion = Callable[..., Version]

SMALL = Limits(memory_bytes=1 << 30)


def change(version: Version, path: str, edit: Callable[[Any], None]) -> Version:
    model = onnx.load(version.folder / path)
    edit(model.graph)
    (version.folder / path).write_bytes(model.SerializeToString())
    write_card(version.folder, version.card)
    return load_version(version.folder)


def endless(graph: Any) -> None:
    """Before its answer it counts to 2 ** 62."""
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["going"]), helper.make_node("Add", ["x", "x"], ["y"])],
        "body",
        [
            helper.make_tensor_value_info("turn", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("x", TensorProto.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("going", TensorProto.BOOL, []),
            helper.make_tensor_value_info("y", TensorProto.FLOAT, None),
        ],
    )
    graph.initializer.append(numpy_helper.from_array(np.array(2**62), "turns"))
    graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))
    first = graph.node[0]
    given = graph.input[0].name
    graph.node.insert(0, helper.make_node("Loop", ["turns", "yes", given], ["looped"], body=body))
    first.input[0] = "looped"


def greedy(graph: Any) -> None:
    """Takes 64 MB for each of a batch, so that 64 are too many where 3 are not."""
    graph.initializer.append(numpy_helper.from_array(np.array([1 << 24]), "width"))
    graph.initializer.append(numpy_helper.from_array(np.array([1]), "one"))
    graph.initializer.append(numpy_helper.from_array(np.array([1]), "last"))
    given, first = graph.input[0].name, graph.node[0]
    graph.node.insert(0, helper.make_node("ReduceSum", [given], ["sum"], keepdims=1))
    graph.node.insert(0, helper.make_node("Shape", [given], ["batch"], start=0, end=1))
    graph.node.insert(1, helper.make_node("Concat", ["batch", "width"], ["shape"], axis=0))
    graph.node.insert(2, helper.make_node("ConstantOfShape", ["shape"], ["zeros"]))
    graph.node.insert(3, helper.make_node("ReduceSum", ["zeros"], ["nothing"], keepdims=0))
    graph.node.insert(4, helper.make_node("Add", [given, "nothing"], ["same"]))
    first.input[0] = "same"
    del graph.node[5]


def test_a_good_version_is_verified_from_any_directory(
    make_version: MakeVersion, add_text: Callable[..., Version], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = make_version(tmp_path / "v1", "v1", 4)
    new = make_version(tmp_path / "v2", "v2", 6, side_dim=2, edges=[(old, "onnx")])
    new = add_text(new, {"east": np.eye(6)[0], "north": np.eye(6)[1]})
    (tmp_path / "numpy.py").write_text("raise SystemExit(7)")  # what lies there is not imported
    monkeypatch.chdir(tmp_path)

    assert verify_isolated(new.folder, {"v1": old.card}, SMALL) == new


def test_what_is_wrong_is_said_as_it_is_without_isolation(make_version: MakeVersion, tmp_path: Path) -> None:
    version = make_version(tmp_path / "v", "v", 4)
    write_card(version.folder, replace(version.card, dim=5))

    with pytest.raises(InvalidVersionFolder, match=r"encoder\.onnx output has shape") as caught:
        verify_isolated(version.folder, {}, SMALL)
    assert caught.value.pointer == "/encoder.onnx"


def test_a_model_that_never_ends_is_refused_after_the_time_it_has(make_version: MakeVersion, tmp_path: Path) -> None:
    version = change(make_version(tmp_path / "v", "v", 4), ENCODER, endless)

    with pytest.raises(InvalidVersionFolder, match="not be verified within"):
        verify_isolated(version.folder, {}, replace(SMALL, seconds=1.5))


def test_a_model_that_takes_too_much_memory_in_a_full_batch_is_refused(
    make_version: MakeVersion, tmp_path: Path
) -> None:
    version = change(make_version(tmp_path / "v", "v", 4), ENCODER, greedy)

    with pytest.raises(InvalidVersionFolder, match=r"memory|batch of 64"):
        verify_isolated(version.folder, {}, SMALL)


def test_an_edges_model_is_held_to_the_same_limits(make_version: MakeVersion, tmp_path: Path) -> None:
    old = make_version(tmp_path / "v1", "v1", 4)
    new = make_version(tmp_path / "v2", "v2", 6, edges=[(old, "onnx")])
    check_edge_isolated(new.edges[0], new.card, old.card, SMALL)
    with pytest.raises(InvalidVersionFolder, match="invalid dimensions"):
        check_edge_isolated(new.edges[0], replace(new.card, dim=5), old.card, SMALL)

    changed = change(new, f"edges/v1/{EDGE_MODEL[EdgeKind.ONNX]}", endless)
    with pytest.raises(InvalidVersionFolder, match="not be verified within"):
        check_edge_isolated(changed.edges[0], new.card, old.card, replace(SMALL, seconds=1.5))


def test_it_ends_with_whoever_asked(make_version: MakeVersion, tmp_path: Path) -> None:
    """Also when that one is killed in the middle."""
    version = change(make_version(tmp_path / "v", "v", 4), ENCODER, endless)
    script = (
        "import subprocess, sys; from pathlib import Path; from index import isolated\n"
        "real = subprocess.Popen\n"
        "def told(*a, **k):\n    p = real(*a, **k); print(p.pid, flush=True); return p\n"
        "subprocess.Popen = told\n"
        f"isolated.verify_isolated(Path({str(version.folder)!r}), {{}}, isolated.Limits())"
    )
    asking = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    with asking:
        child = int(asking.stdout.readline())
        time.sleep(0.5)
        asking.send_signal(signal.SIGKILL)
    until = time.monotonic() + 10
    while running(child) and time.monotonic() < until:
        time.sleep(0.05)
    assert not running(child)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("ending", ["os._exit(3)", "os.kill(os.getpid(), 11)"])
def test_a_crash_of_the_runtime_is_the_models_fault(
    make_version: MakeVersion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """A package that crashes on import stands for an onnxruntime that does."""
    (tmp_path / "crash" / "onnxruntime").mkdir(parents=True)
    (tmp_path / "crash" / "onnxruntime" / "__init__.py").write_text(f"import os\n{ending}\n")
    monkeypatch.setattr(isolated, "ROOT", tmp_path / "crash")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'crash'}{os.pathsep}{Path(isolated.__file__).parent.parent}")
    version = make_version(tmp_path / "v", "v", 4)

    with pytest.raises(InvalidVersionFolder, match="ended the process that verifies them"):
        verify_isolated(version.folder, {}, SMALL)
