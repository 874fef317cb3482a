"""Each command answers a program in JSON; an error is JSON too, with the exit code it has without."""

from __future__ import annotations

import json

import httpx
import numpy as np
import pytest
import typer

from regraft import cli
from regraft.models import BackfillInfo
from regraft.terminal import answers
from regraft.terminal.command import Commands
from staging.api.answers import filled
from staging.api.hostile import COMMANDS, H
from staging.inputs.builders import make_version

STREAMS = {"backfill start g --watch", "backfill watch 3"}


def leaves(command, path=()):
    inner = getattr(command, "commands", None)
    if inner is None:
        return {" ".join(path): command}
    return {name: leaf for word, child in inner.items() for name, leaf in leaves(child, (*path, word)).items()}


EVERY = leaves(typer.main.get_command(cli.app))
LOCAL = {
    "serve": "serve --workers 0 --port 0 --data {tmp}/data",
    "worker": "worker --data {tmp}/data",
    "migrate": "migrate --data {tmp}/data",
    "doctor": "doctor --data {tmp}/data",
    "plan": "plan {old} {new} --reencode-rate 10",
    "version verify": "version verify {new}",
    "version pack": "version pack {new} {tmp}/v2.zip",
    "version create": "version create api --dim 3 --into {tmp}",
    "train": "train digits_v1 --save {tmp}/own.toml",
    "recipes": "recipes",
    "evaluate": "evaluate {old} {new} --data arrays --root {images}",
    "fit-edge": "fit-edge {old} {new} --pairs {pairs} --kind auto --overwrite",
    "export": "export {old} --out {tmp}/exported",
    "sweep": "sweep digits_oca --out {tmp}/sweep",
    "reproduce": "reproduce cifar100-b --root nowhere --out {tmp}/paper",
}
"""Commands that speak to no service."""


@pytest.fixture
def machine(monkeypatch, tmp_path, places, image_set):
    """What local commands find; what would run for long or train does nothing."""
    import service.backfills.worker
    import service.http.app
    import training.comparison.schedule
    import training.comparison.sweep
    import training.export
    from training.comparison.sweep import Trial
    from training.recipes import Recipe

    trial = Trial(Recipe("r", options={"weight": 1.0}), 0.5, float("nan"), 0.7)
    for module, name, told in (
        (service.backfills.worker, "run", None),
        (training.export, "export", tmp_path / "exported"),
        (training.comparison.sweep, "sweep", [trial]),
        (training.comparison.schedule, "compare_methods", None),
    ):
        monkeypatch.setattr(module, name, lambda *_, told=told, **__: told)
    monkeypatch.setattr(service.http.app, "serve", lambda settings, listening: listening(settings.port))
    old = make_version(tmp_path / "old", "old", 2)
    new = make_version(tmp_path / "new", "new", 4, drift=0.4, edges=[(old, "truncate")])
    x = np.random.default_rng(0).normal(size=(60, 4))
    np.savez(tmp_path / "pairs.npz", new=x, old=x[:, :2])
    return places | {
        "tmp": tmp_path,
        "old": old.folder,
        "new": new.folder,
        "pairs": tmp_path / "pairs.npz",
        "images": image_set,
    }


def answered(shown, stream):
    """One document, or one for each line of a stream; nothing else, and all of it plain."""
    lines = shown.splitlines()
    assert shown.isascii()
    assert len(lines) == 1 or stream
    return [json.loads(line, parse_constant=pytest.fail) for line in lines][-1]


def test_every_command_is_tried_here_and_has_the_options():
    speaking = {name for name in EVERY for line, _ in COMMANDS if f"{line} ".startswith(f"{name} ")}

    assert speaking | set(LOCAL) == set(EVERY)
    assert not speaking & set(LOCAL)
    assert [name for name, command in EVERY.items() if not any("--json" in p.opts for p in command.params)] == []
    timed = {name for name, command in EVERY.items() if any("--timeout" in p.opts for p in command.params)}
    assert timed == {name for name, command in EVERY.items() if any("--api-key" in p.opts for p in command.params)}


@pytest.mark.parametrize(("line", "told"), COMMANDS, ids=[line for line, _ in COMMANDS])
def test_a_command_that_speaks_to_the_service_answers_in_json(run, service, places, line, told):
    service.answers |= told
    words = line.format(**places).split()

    expected, _, _ = run(*words)
    code, shown, said = run(*words, "--json")

    assert code == expected
    if line.endswith("no.parquet"):
        assert (shown, json.loads(said.splitlines()[-1])["detail"]) == ("", H)
    else:
        assert isinstance(answered(shown, line in STREAMS), dict | list)


@pytest.mark.parametrize("name", LOCAL)
def test_a_command_that_speaks_to_none_answers_in_json(run, machine, name):
    if name == "doctor":
        run(*LOCAL["migrate"].format(**machine).split())

    code, shown, said = run(*LOCAL[name].format(**machine).split(), "--json")

    assert code == 0, said
    assert isinstance(answered(shown, False), dict | list)


def test_a_watched_backfill_is_a_stream_that_ends_with_what_it_came_to(run, service):
    line = "backfill watch 3"
    service.answers |= dict(COMMANDS)[line]
    known = service.answers["GET /v1/backfills/3"]
    events = 2 * f"event: progress\ndata: {json.dumps(filled(BackfillInfo, known))}\n\n"
    service.answers["GET /v1/backfills/3/events"] = httpx.Response(200, text=f"{events}event: end\ndata: {{}}\n\n")

    code, shown, _ = run(*line.split(), "--json")

    assert code == 3
    lines = [json.loads(line) for line in shown.splitlines()]
    assert [line["id"] for line in lines] == [3, 3, 3]
    assert lines[-1]["failures"][0]["reason"] == H


REFUSED = {
    "status": 409,
    "code": "in_use",
    "detail": "no",
    "request_id": "r1",
    "errors": [{"pointer": "/a", "detail": "b"}],
}


@pytest.mark.parametrize(
    ("line", "code", "told"),
    [
        ("gallery show g", 1, {**REFUSED, "pointer": "/a"}),
        ("gallery delete g", 1, {"code": "invalid_argument", "pointer": "/yes"}),
        ("query g", 1, {"code": "invalid_argument"}),
        ("ingest g {folder}/none", 1, {"code": "invalid_argument"}),
        ("evaluation add g --embeddings {folder} --version v1", 1, {"code": "invalid_argument"}),
        ("gallery show", 2, {"code": "usage"}),
        ("gallery show g --nonsense", 2, {"code": "usage"}),
        ("deploy g v2 --share 0.1", 2, {"code": "usage"}),
        ("nonsense", 2, {"code": "usage"}),
    ],
)
def test_an_error_is_one_json_object_on_standard_error_with_the_same_exit_code(run, service, places, line, code, told):
    service.answers["GET /v1/galleries/g"] = httpx.Response(409, json=REFUSED)
    words = line.format(**places).split()

    plain = run(*words)[0]
    ended, shown, said = run(*words, "--json")

    assert (ended, plain, shown) == (code, code, "")
    error = json.loads(said.splitlines()[-1])
    assert {name: error[name] for name in told} == told
    assert error["exit_code"] == code
    assert error["detail"]


def test_whatever_a_library_prints_stays_off_standard_output(monkeypatch, run):
    def noisy() -> None:
        print("library")
        answers.out.print("to people")
        answers.answer({"n": np.int64(2), "x": float("nan"), "path": np.float32(0.5)})

    app = Commands()
    app.command("one")(noisy)
    app.command("two")(lambda: None)
    monkeypatch.setattr(cli, "app", app)

    assert run("one", "--json")[1] == '{"n": 2, "x": null, "path": 0.5}\n'
    assert run("one")[1] == "library\nto people\n"
