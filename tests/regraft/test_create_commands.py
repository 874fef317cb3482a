"""`regraft version create` as a user runs it."""

from __future__ import annotations

import json

import onnx
import pytest
from onnx import helper

from index.version import Preprocess
from index.version_folder.folder import load_version
from staging.external.provider import DIM, providing
from staging.inputs.text_models import write_model, write_tokenizer


@pytest.fixture
def model(tmp_path):
    """An ONNX model (1, 3, 8, 8) -> (1, 3) in a file."""
    given, made = (
        helper.make_tensor_value_info(name, 1, shape) for name, shape in (("x", (1, 3, 8, 8)), ("y", (1, 3, 1, 1)))
    )
    graph = helper.make_graph([helper.make_node("GlobalAveragePool", ["x"], ["y"])], "tiny", [given], [made])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


def test_a_version_for_vectors_made_elsewhere(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert run("version", "create", "api-v1", "--dim", "1536") == (
        0,
        "wrote api-v1: 1536 numbers, cosine, takes embeddings from outside\nnext: regraft version register api-v1\n",
        "",
    )
    assert run("version", "create", "api-v1", "--dim", "8")[0] == 1
    assert (
        run("version", "create", "api-v1", "--dim", "8", "--space", "lorentz", "--curvature", 2, "--overwrite")[0] == 0
    )
    assert load_version(tmp_path / "api-v1").card.space == {"kind": "lorentz", "curvature": 2.0}


@pytest.mark.parametrize("name", ["below/v1", "/v1", "../v1"])
def test_a_name_that_is_a_path_is_refused(run, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)

    code, _, said = run("version", "create", name, "--dim", "8")

    assert (code, "--into FOLDER" in said, list(tmp_path.iterdir())) == (1, True, [])


def test_a_version_of_an_onnx_file(run, tmp_path, model):
    options = [
        "--size",
        "8",
        "--resize",
        "9x10",
        "--interpolation",
        "bicubic",
        "--mean",
        "0.5,0.5,0.5",
        "--std",
        "1,1,2",
    ]

    code, shown, said = run("version", "create", "mine", "--onnx", model, *options, "--into", tmp_path / "versions")

    assert (code, said) == (0, "")
    assert "differs from m.onnx by at most " in shown
    made = load_version(tmp_path / "versions/mine").card
    assert made.preprocess == Preprocess(8, 8, "RGB", (9, 10), False, "bicubic", (0.5, 0.5, 0.5), (1, 1, 2))
    (tmp_path / "p.json").write_text(json.dumps(made.preprocess.as_json()))
    again = ["mine", "--onnx", model, "--preprocess", tmp_path / "p.json", "--into", tmp_path]
    assert run("version", "create", *again)[0] == 0
    assert load_version(tmp_path / "mine").card == made


def test_a_version_of_an_onnx_file_of_texts(run, tmp_path):
    model, tokenizer = write_model(tmp_path / "m.onnx"), write_tokenizer(tmp_path / "t.json", None)
    options = ("--tokenizer", tokenizer, "--output", "made", "--pool", "mean", "--query-prompt", "q", "--space", "l2")

    code, shown, said = run("version", "create", "t", "--onnx", model, *options, "--max-tokens", 7, "--into", tmp_path)

    assert (code, said) == (0, "")
    assert "6 numbers, l2, reads texts\non 100 texts the ONNX model differs from m.onnx by at most " in shown
    made = load_version(tmp_path / "t").card
    assert (made.method, made.recipe["max_tokens"], dict(made.prompts)) == ("onnx", 7, {"query": "q"})
    code, _, said = run("version", "create", "u", "--onnx", model, "--size", 8, "--output", "made", "--into", tmp_path)
    assert (code, "a model of texts requires --tokenizer" in said) == (1, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "one source is required: --dim, --onnx, --timm, --torchvision, --hf, --open-clip, --api; given: none"),
        (
            ["--timm", "test_vit", "--pool", "cls"],
            "--pool cannot be used with --timm; legal: --space, --curvature, --w",
        ),
        (["--hf", "none"], "--hf none must be a folder with config.json or modules.json"),
        (["--hf", "none", "--weights", "w"], "--weights cannot be used with --hf; legal: --space, --curvature, --pool"),
        (["--timm", "test_vit", "--weights", "none.pth"], "weights are not available from none.pth: no such file"),
        (["--dim", 3, "--onnx", "x"], "given: --dim and --onnx"),
        (["--dim", 3, "--mean", "1"], "--mean cannot be used with --dim; legal: --space, --curvature"),
        (["--dim", 3, "--space", "dot"], "space.kind must be one of cosine, l2, lorentz"),
        (["--onnx", "x"], "--preprocess FILE, or --size"),
        (["--onnx", "x"], "or --tokenizer FILE for a model of texts"),
        (["--onnx", "x", "--size", "8by8"], "--size '8by8' must be pixels"),
        (["--onnx", "x", "--size", 8, "--mean", "a"], "--mean 'a' must be numbers"),
        (["--onnx", "x", "--size", 8, "--mean", "0.5"], "mean must be 3 numbers"),
        (["--onnx", "x", "--size", 8, "--preprocess", "y"], "--size cannot be used with --preprocess"),
        (["--onnx", "none.onnx", "--size", 8], "none.onnx cannot be read as an ONNX model"),
        (["--onnx", "x", "--size", 8, "--tokenizer", "t"], "--size cannot be used with --tokenizer"),
        (["--onnx", "x", "--size", 8, "--max-tokens", 9], "--max-tokens requires --tokenizer, or --api"),
        (["--onnx", "x", "--size", 8, "--query-prompt", "q"], "--query-prompt requires --tokenizer, or --api"),
        (["--onnx", "none.onnx", "--tokenizer", "t"], "none.onnx cannot be read as an ONNX model"),
        (["--hf", "x", "--tokenizer", "t"], "--tokenizer cannot be used with --hf"),
    ],
)
def test_what_is_missing_or_wrong_is_named_by_its_option(run, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)

    code, shown, said = run("version", "create", "mine", *options)

    assert (code, shown) == (1, "")
    assert message in said
    assert list(tmp_path.iterdir()) == []


def test_a_version_by_a_providers_api(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with providing() as provider:
        monkeypatch.setenv("PROVIDER_API_KEY", provider.key)
        options = ("--api", f"{provider.url}/", "--model", "m", "--dimension", DIM, "--key-env", "PROVIDER_API_KEY")
        more = ("--batch-size", 50, "--requests-per-minute", 6000, "--price", 0.13, "--item-prompt", "passage: ")
        code, shown, _ = run("version", "create", "api", *options, *more)
    assert code == 0
    for told in ("reads texts", "order are right", f"REGRAFT_EMBEDDING_APIS={provider.url}, and PROVIDER"):
        assert told in shown
    card = load_version(tmp_path / "api").card
    assert (card.api.batch_size, card.api.price, dict(card.prompts)) == (50, 0.13, {"item": "passage: "})

    for wrong, told in ((("--pool", "cls"), "--requests-per-minute"), (("--encoding", "int8"), "float, base64")):
        code, _, said = run("version", "create", "other", *options, *wrong)
        assert (code, told in " ".join(said.split())) == (1, True)
    assert "--model" in run("version", "create", "other", "--api", "https://host", "--dim", 3)[2]
