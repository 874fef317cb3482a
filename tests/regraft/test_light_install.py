"""What `pip install regraft` alone can do: in a process of its own, packages that only an extra brings are refused."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from regraft.commands import children
from regraft.terminal.extras import needs

ROOT = Path(__file__).parents[2]
OLD, NEW = ROOT / "examples/v1", ROOT / "examples/v2-bct"
NOBODY = ("--url", "http://127.0.0.1:9")
REFUSING = """
import contextlib, io, json, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in refused:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

refused, commands = json.loads(sys.stdin.read())
refused = set(refused)
sys.meta_path.insert(0, Refuse())

from regraft import Client
from regraft.cli import main

Client("http://127.0.0.1:9").close()
said = []
for command in commands:
    sys.argv = ["regraft", *command]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
        except BaseException as error:
            code = repr(error)
    said.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(said))
"""
WORKS = {
    ("--help",): "Usage",
    ("serve", "--help"): "Usage",
    ("recipes", "digits_v1"): "digits_v1",
    ("version", "pack", OLD): "wrote",
    ("version", "create", "api-v1", "--dim", "4"): "takes embeddings from outside",
}
AWAY = [("gallery", "list", *NOBODY), ("version", "register", OLD, *NOBODY), ("query", "any", "--text", "x", *NOBODY)]
NEEDS = {
    ("serve",): "serve",
    ("worker",): "serve",
    ("migrate",): "serve",
    ("doctor",): "serve",
    ("worker", *NOBODY): "worker",
    ("version", "verify", OLD): "worker",
    ("plan", OLD, NEW): "worker",
    ("version", "create", "mine", "--onnx", OLD / "encoder.onnx", "--size", "8"): "worker",
    ("version", "create", "mine", "--timm", "resnet18"): "models",
    ("train", "digits_v1"): "train",
    ("evaluate", OLD, NEW): "train",
    ("fit-edge", OLD, NEW, "--kind", "ridge", "--data", "digits"): "train",
    ("export", OLD, "--out", "nowhere"): "train",
    ("sweep", "digits_oca"): "train",
    ("reproduce", "cifar100-b", "--root", "nowhere"): "train",
}


def _brought(requirements: list[str], extras: frozenset[str] = frozenset()) -> set[str]:
    """The distributions that these requirements install, however deep."""
    found: set[str] = set()
    for line in requirements:
        wanted = Requirement(line)
        if wanted.marker and not any(wanted.marker.evaluate({"extra": extra}) for extra in {"", *extras}):
            continue
        found |= {wanted.name.lower()}
        found |= _brought(metadata.requires(wanted.name) or [], frozenset(wanted.extras))
    return found


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> Mapping[tuple[object, ...], tuple[object, str, str]]:
    """Exit code, standard output and standard error of every command, none of whose extras is there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    light = _brought(project["dependencies"]) | {"regraft"}
    refused = [
        module
        for module, names in metadata.packages_distributions().items()
        if not light & {name.lower().replace("_", "-") for name in names} and module not in sys.stdlib_module_names
    ]
    assert {"fastapi", "sqlalchemy", "faiss", "onnxruntime", "onnx", "PIL", "alembic", "uvicorn"} <= set(refused)
    commands = [*WORKS, *AWAY, *NEEDS]
    answer = subprocess.run(
        [sys.executable, "-c", REFUSING],
        input=json.dumps([refused, commands], default=str),
        capture_output=True,
        text=True,
        cwd=tmp_path_factory.mktemp("cwd"),
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    return {command: tuple(each) for command, each in zip(commands, json.loads(answer.stdout), strict=True)}


@pytest.mark.parametrize("command", WORKS)
def test_the_light_install_has_what_needs_no_extra(said, command):
    code, out, err = said[command]
    assert (code, err) == (0, "")
    assert WORKS[command] in out


@pytest.mark.parametrize("command", AWAY)
def test_the_light_install_speaks_to_a_service(said, command):
    code, _, err = said[command]
    assert code == 1
    assert err.startswith("regraft: no answer from http://127.0.0.1:9")


@pytest.mark.parametrize("command", NEEDS)
def test_a_command_whose_extra_is_missing_names_it(said, command):
    code, out, err = said[command]
    assert (code, out) == (1, "")
    assert err.endswith(f"is not installed; this command needs: pip install 'regraft[{NEEDS[command]}]'\n")
    assert err.count("\n") == 1


@pytest.mark.parametrize("module", ["service.gone", "regraft.gone"])
def test_a_missing_module_of_its_own_is_no_extra(module):
    with pytest.raises(ModuleNotFoundError, match=module), needs("serve"):
        importlib.import_module(module)


@pytest.mark.parametrize("code", ["import regraft", "import index, regraft"])
def test_a_users_module_that_hides_one_of_ours_is_named(tmp_path, code):
    (tmp_path / "index.py").write_text("")

    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)

    assert ended.stderr.splitlines()[-1].startswith(f"ImportError: `import index` finds {tmp_path / 'index.py'}, not")


def test_a_command_whose_package_is_hidden_says_so(tmp_path):
    (hiding := tmp_path / "service.py").write_text("")

    command = [sys.executable, "-m", "regraft", "migrate"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert (ended.returncode, ended.stdout) == (1, "")
    assert " ".join(ended.stderr.split()).startswith(f"regraft: `import service` finds {hiding}, not Regraft's package")


def test_a_worker_imports_nothing_from_the_working_directory(monkeypatch, tmp_path):
    (tmp_path / "regraft.py").write_text("raise SystemExit(77)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REGRAFT_DATABASE_URL", "nonsense")

    worker = children.start_worker()

    assert worker.stdin is not None
    worker.stdin.close()
    assert worker.wait(60) == 1
