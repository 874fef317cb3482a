"""`regraft version`: folders that are packed, verified, registered and listed."""

from __future__ import annotations

import numpy as np
import onnx

from staging.inputs.builders import make_version
from staging.inputs.versions import change_model


def test_version_pack_writes_an_archive_that_verifies_again(run, tmp_path):
    version = make_version(tmp_path / "v1", "v1", 4)

    assert run("version", "verify", version.folder)[1] == "v1: 4 numbers, cosine, method independent; edges: none\n"
    code, shown, _ = run("version", "pack", version.folder, tmp_path / "out.zip")

    assert (code, shown) == (0, f"wrote {tmp_path / 'out.zip'}\n")


def test_version_verify_runs_batches_as_a_registration_does(run, tmp_path):
    version = make_version(tmp_path / "v1", "v1", 4)

    def keep_32(model):
        model.graph.node[2].output[0] = "all"
        model.graph.node.append(onnx.helper.make_node("Slice", ["all", "zero", "most"], ["out"]))
        for name, number in (("zero", 0), ("most", 32)):
            model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([number]), name))

    change_model(version.folder, "encoder.onnx", keep_32)

    code, _, said = run("version", "verify", version.folder)

    assert (code, said) == (1, "regraft: encoder.onnx gives shape (32, 4) for 64 images, not (N, 4)\n")


def test_an_archive_is_not_written_into_the_version_that_it_packs(run, tmp_path, monkeypatch):
    """It would pack a part of itself, and the folder would no longer be a version's."""
    version = make_version(tmp_path / "v1", "v1", 4)
    monkeypatch.chdir(version.folder)

    code, _, said = run("version", "pack", ".")

    assert (code, said) == (
        1,
        f"regraft: {version.folder / 'v1.zip'} is inside a version folder, which may only have its own files\n",
    )
    assert run("version", "verify", ".")[0] == 0


def test_a_broken_version_folder_is_refused_in_one_line(run, tmp_path):
    version = make_version(tmp_path / "v1", "v1", 4)
    (version.folder / "encoder.onnx").write_bytes(b"other")

    code, shown, said = run("version", "verify", version.folder)

    assert (code, shown) == (1, "")
    assert said == "regraft: encoder.onnx does not have the sha256 that card.json lists\n"


def test_versions_are_registered_and_listed(run, service, tmp_path):
    edges = [{"old": "v1", "kind": "truncate"}]
    listed = {"name": "v2", "dim": 6, "space": {"kind": "cosine"}, "method": "oca", "edges": edges, "problem": None}
    broken = {**listed, "name": "v3", "problem": "encoder.onnx is [not] it"}
    service.answers |= {"POST /v1/versions": listed, "GET /v1/versions": {"versions": [listed, broken]}}

    assert run("version", "register", make_version(tmp_path / "v2", "v2", 6).folder)[1] == "registered v2\n"
    shown = run("version", "list")[1].splitlines()
    assert shown[1].split() == ["v2", "6", "cosine", "oca", "truncate->v1"]
    assert shown[-1] == "v3 is quarantined: encoder.onnx is [not] it"


def test_an_unwritable_target_is_one_line_too(run, tmp_path):
    version = make_version(tmp_path / "v1", "v1", 4)

    code, _, said = run("version", "pack", version.folder, tmp_path / "missing" / "v1.zip")

    assert code == 1
    assert said.startswith("regraft: ")
    assert said.count("\n") == 1
