"""The command: what it asks of the service, what it prints, and how it fails."""

from __future__ import annotations

import json
import sys
from importlib.abc import MetaPathFinder
from types import ModuleType

import httpx
import pytest

import regraft
from regraft.__main__ import main
from staging.api.answers import GALLERY, problem
from staging.processes import forked

COMMANDS = [
    *("serve", "worker", "migrate", "doctor", "plan", "gallery", "ingest", "query", "version", "gate", "deploy"),
    *("rollback", "backfill", "edge", "evaluation", "deployment", "retire", "audit"),
    *("train", "recipes", "evaluate", "fit-edge", "export", "sweep", "reproduce"),
]


def test_help_shows_every_command_with_one_line(run):
    code, shown, _ = run("--help")

    assert code == 0
    for name in COMMANDS:
        (line,) = [line for line in shown.splitlines() if line.startswith(f"│ {name} ")]
        assert line.rstrip(" │").endswith(".")


def test_version_is_the_package_version(run):
    assert run("--version")[:2] == (0, "0.2.0\n")


def test_galleries_are_listed_with_their_mix(run, service):
    service.answers["GET /v1/galleries"] = {"galleries": [{**GALLERY, "mix": {"v1": 1, "v2": 1}}]}

    code, shown, _ = run("gallery", "list")

    assert code == 0
    assert [line.split() for line in shown.splitlines()] == [
        ["gallery", "current", "items", "mix"],
        ["g", "v1", "2", "v1:", "1,", "v2:", "1"],
    ]


def test_a_row_that_is_piped_is_one_line_and_loses_nothing(run, service):
    names = ["g" * 150, "h " * 70]
    service.answers["GET /v1/galleries"] = {"galleries": [{**GALLERY, "name": name} for name in names]}

    shown = run("gallery", "list")[1].splitlines()

    assert [line.startswith(name) for line, name in zip(shown[1:], names, strict=True)] == [True, True]


def test_url_and_key_come_from_options_or_the_environment(run, service, monkeypatch):
    service.answers["GET /v1/galleries"] = {"galleries": []}
    monkeypatch.setenv("REGRAFT_URL", "http://elsewhere:9")
    monkeypatch.setenv("REGRAFT_API_KEY", "secret")

    run("gallery", "list")
    run("gallery", "list", "--url", "http://option:1", "--api-key", "other")

    assert [(str(r.url), r.headers["authorization"]) for r in service.requests] == [
        ("http://elsewhere:9/v1/galleries", "Bearer secret"),
        ("http://option:1/v1/galleries", "Bearer other"),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "backfill start g --rate nan",
        "backfill start g --filter {nan}",
        "gallery index g hnsw --recall nan",
        "deploy g v2 --share inf --until shadow",
        "deploy g v2 --reason {latin}",
        "gate g v2 --label l --far nan",
        "edge fit v2 v1 --kind ridge --gallery g --set strength=nan",
        "evaluation add g {lines}",
        "ingest g {texts}",
        "query g --like a --threshold nan",
        "query g --like a --filter {nan}",
        "query g --like {latin}",
        "query g --text {latin}",
    ],
)
def test_what_no_request_can_hold_is_one_line_of_an_error(run, service, tmp_path, line):
    (tmp_path / "lines.jsonl").write_text('{"text": "a", "label": NaN}')
    (tmp_path / "texts.jsonl").write_text(r'{"id": "a", "text": "h\ud800i"}')
    given = {name: tmp_path / f"{name}.jsonl" for name in ("lines", "texts")}

    code, _, said = run(*line.format(latin="caf\udce9", nan='{"field":"x","eq":NaN}', **given).split())

    assert (code, service.requests) == (1, [])
    assert said.splitlines()[-1].startswith("regraft: ")
    assert " cannot be sent" in said.splitlines()[-1]


def test_a_timeout_comes_from_an_option_or_the_environment(run, service, monkeypatch):
    service.answers["GET /v1/galleries"] = {"galleries": []}
    monkeypatch.setenv("REGRAFT_TIMEOUT", "90")

    run("gallery", "list")
    run("gallery", "list", "--timeout", 5)

    assert [request.extensions["timeout"]["read"] for request in service.requests] == [90, 5]


@pytest.mark.parametrize(
    ("status", "detail", "said"),
    [
        (
            401,
            "The header is missing",
            "the service requires an API key: --api-key or REGRAFT_API_KEY is missing or wrong",
        ),
        (409, "it is there; replace=true replaces it", "it is there; --replace replaces it"),
        (422, "gate 1 refused: say in `override` why", "gate 1 refused: say in --override why"),
    ],
)
def test_a_refusal_names_the_options_of_the_command(run, service, status, detail, said):
    service.answers["GET /v1/galleries"] = problem(status, detail=detail, code="c", request_id="r")

    assert run("gallery", "list") == (1, "", f"regraft: {said}\n")
    told = json.loads(run("gallery", "list", "--json")[2])
    assert (told["detail"], told["code"], told["status"], told["request_id"]) == (said, "c", status, "r")


@pytest.mark.parametrize(
    ("detail", "pointer", "said"),
    [
        ("all zero", "/embeddings/v1/3", "all zero (at /embeddings/v1/3)"),
        ("all refused; /items/0/id: too long", "/items/0/id", "all refused; /items/0/id: too long"),
        ("k must be 1", "/k", "k must be 1"),
        ("no", "", "no"),
    ],
)
def test_a_refusal_says_which_of_many_it_is_about(run, service, detail, pointer, said):
    errors = [{"pointer": pointer, "detail": detail}] if pointer else []
    service.answers["GET /v1/galleries"] = problem(422, detail=detail, code="c", errors=errors)

    assert run("gallery", "list") == (1, "", f"regraft: {said}\n")


def test_deleting_a_gallery_asks_first(run, service):
    code, _, _ = run("gallery", "delete", "g")

    assert code == 1
    assert service.requests == []

    service.answers["DELETE /v1/galleries/g"] = httpx.Response(204)
    assert run("gallery", "delete", "g", "--yes")[:2] == (0, "deleted gallery g\n")


@pytest.mark.parametrize("url", ["foo", "localhost:8080", "http://", "ftp://x"])
def test_an_address_that_is_none_is_refused_at_once(run, url):
    code, _, shown = run("gallery", "list", "--url", url)

    assert (code, "http:// or https://" in shown) == (1, True)


@pytest.mark.parametrize("command", [["gallery", "list"], ["migrate", "--data", "/dev/null/x"]])
def test_no_service_and_no_data_folder_give_one_line_and_no_traceback(command, tmp_path):
    url = ["--url", "http://127.0.0.1:9"] if command[0] == "gallery" else []

    code, out, err = forked.run(["-m", "regraft", *command, *url], forked.environment(), tmp_path)

    assert (code, out) == (1, "")
    assert err.startswith("regraft: ")
    assert err.count("\n") == 1


def test_ctrl_c_while_a_command_is_imported_ends_it_without_a_stack_trace(monkeypatch):
    class Interrupts(MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name == "regraft.cli":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "regraft.cli")
    monkeypatch.delattr(regraft, "cli")
    monkeypatch.setattr(sys, "meta_path", [Interrupts(), *sys.meta_path])

    with pytest.raises(SystemExit) as ended:
        main()

    assert ended.value.code == 130


@pytest.mark.parametrize(
    ("line", "offered", "not_offered"),
    [
        ("regraft ba", {"backfill"}, {"query"}),
        ("regraft backfill re", {"resume"}, {"start"}),
        ("regraft query photos --fi", {"--filter", "--fields"}, {"--url"}),
        ("regraft item list photos --json --u", {"--url"}, {"--json"}),
    ],
)
def test_a_shell_completes_commands_and_options(run, monkeypatch, line, offered, not_offered):
    words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1), "_REGRAFT_COMPLETE": "complete_bash"}
    for name, value in words.items():
        monkeypatch.setenv(name, value)
    # The variables are named after the program, which is this one here.
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))

    code, shown, _ = run()

    assert code == 0
    assert offered <= set(shown.split())
    assert not_offered.isdisjoint(shown.split())
