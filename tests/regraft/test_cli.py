"""The command: what it asks of the service, what it prints, and how it fails."""

from __future__ import annotations

import json
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from unittest.mock import Mock

import httpx
import numpy as np
import onnx
import pytest

import regraft
from index.errors import InvalidVersionFolder
from regraft.__main__ import main
from staging import forked
from staging.answers import GALLERY, problem
from staging.builders import make_version
from staging.versions import change_model

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
    assert said.splitlines()[-1].startswith("regraft: the request cannot be sent")


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


@pytest.mark.parametrize("rate", ["0", "-5", "nan", "inf"])
def test_a_plan_takes_possible_rates_only(run, rate):
    for option in ("--reencode-rate", "--transform-rate"):
        code, _, shown = run("plan", "a", "b", option, rate)

        assert (code, "must be a number above 0" in shown) == (2, True)


def test_a_plan_from_a_version_to_itself_is_refused(run):
    version = Path(__file__).parents[2] / "examples" / "v1"

    code, _, shown = run("plan", version, version)

    assert (code, "same version 'v1'" in shown) == (1, True)


def test_a_plan_of_models_that_cannot_be_counted_still_tells_time_and_bytes(run, monkeypatch):
    examples = Path(__file__).parents[2] / "examples"
    command = ["plan", examples / "photos-v1", examples / "photos-v2", "--reencode-rate", 100]

    code, counted, _ = run(*command)
    monkeypatch.setattr("index.evaluation.cost.encoder_macs", Mock(side_effect=InvalidVersionFolder("unknown")))
    _, shown, _ = run(*command)

    assert code == 0
    assert counted.splitlines()[1].split()[:7] == ["reencode", "2.8", "h", "93.1", "GiB", "1.19e+07", "1.19e+13"]
    assert shown.splitlines()[1].split()[:6] == ["reencode", "2.8", "h", "93.1", "GiB", "unknown"]


def test_a_plan_prices_a_provider(run, tmp_path):
    limits = {"price": 0.13, "tokens_per_minute": 1e6, "batch_size": 100}
    card = {"format": 1, "name": "new", "dim": 8, "space": {"kind": "cosine"}}
    for name, api in (("priced", limits), ("free", {})):
        (tmp_path / name).mkdir()
        said = {**card, "api": {"url": "http://api.example/v1", "model": "m", **api}}
        (tmp_path / name / "card.json").write_text(json.dumps(said))
    old = make_version(tmp_path / "old", "old", 4).folder

    code, shown, said = run("plan", old, tmp_path / "priced", "--items", 2_000_000, "--item-tokens", 50, "--json")
    told = run("plan", old, tmp_path / "free", "--item-tokens", 50)[1]

    assert said == ""
    (way,) = json.loads(shown)["ways"]
    assert (code, way["tokens"], way["price"]) == (0, 100_000_000, pytest.approx(13.0))
    assert (way["seconds"], way["bytes_read"], way["macs"]) == (pytest.approx(6000), 0, None)
    assert "about 50,000,000 tokens, no price in the version's card" in told
    assert "unknown" in told


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


@pytest.mark.parametrize("command", [["gallery", "list"], ["migrate", "--data", "/dev/null/x"]])
def test_no_service_and_no_data_folder_give_one_line_and_no_traceback(command, tmp_path):
    url = ["--url", "http://127.0.0.1:9"] if command[0] == "gallery" else []

    code, out, err = forked.run(["-m", "regraft", *command, *url], forked.environment(), tmp_path)

    assert (code, out) == (1, "")
    assert err.startswith("regraft: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", ["serve", "worker"])
@pytest.mark.parametrize("url", ["s4://bucket/images", "s3://"])
def test_a_store_of_images_that_cannot_be_used_is_one_line(run, monkeypatch, tmp_path, command, url):
    monkeypatch.setenv("REGRAFT_BLOBS_URL", url)

    code, _, shown = run(command, "--data", tmp_path)

    assert code == 1
    assert shown.startswith("regraft: REGRAFT_BLOBS_URL")
    assert shown.count("\n") == 1


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("nonsense", "the database cannot be used: "),
        ("postgresql+psycopg://u@h:port/db", "the database cannot be used: "),
        ("sqlite:////nowhere/x.db", "the database cannot be used: "),
        ("oracle+nodriver://x", "the database cannot be used: "),
        ("firebird://x", "the database cannot be used: "),
        ("mssql+pyodbc://x", "the database cannot be used: REGRAFT_DATABASE_URL must be postgresql://"),
        ("postgresql+psycopg2://h/db", "the database cannot be used: REGRAFT_DATABASE_URL must be postgresql://"),
        ("sqlite://", "the database cannot be used: REGRAFT_DATABASE_URL must be postgresql://"),
        ("sqlite:///:memory:", "the database cannot be used: REGRAFT_DATABASE_URL must be postgresql://"),
        ("sqlite:///file:x?mode=memory&uri=true", "the database cannot be used: REGRAFT_DATABASE_URL must be "),
    ],
)
@pytest.mark.parametrize("command", ["migrate", "serve", "worker"])
def test_a_database_that_cannot_be_used_is_one_line(run, monkeypatch, tmp_path, command, url, said):
    monkeypatch.setenv("REGRAFT_DATABASE_URL", url)

    code, _, shown = run(command, "--data", tmp_path)

    assert code == 1
    assert shown.startswith(f"regraft: {said}")
    assert shown.count("\n") == 1


@pytest.mark.parametrize("options", [[], ["--json"]])
@pytest.mark.parametrize(
    "url", ["postgresql+psycopg://u:s3cr3t@h/db", "postgresql+psycopg://h/db?user=u&password=s3cr3t"]
)
def test_migrate_shows_no_password(run, monkeypatch, tmp_path, url, options):
    monkeypatch.setenv("REGRAFT_DATABASE_URL", url)
    monkeypatch.setattr("service.store.database.upgrade", lambda settings: False)

    code, *told = run("migrate", "--data", tmp_path, *options)

    assert (code, "h/db" in told[0], "s3cr3t" in "".join(told)) == (0, True, False)


@pytest.mark.parametrize(
    ("command", "setting"),
    [
        ("serve", "REGRAFT_ENCODER_DEVICE"),
        ("worker", "REGRAFT_ENCODER_DEVICE"),
        ("serve", "REGRAFT_INDEX_DEVICE"),
    ],
)
def test_a_device_that_cannot_be_had_is_one_line(run, monkeypatch, tmp_path, command, setting):
    monkeypatch.setenv(setting, "cuda")

    code, _, said = run(command, "--data", tmp_path)

    assert (code, said.count("\n"), f"{setting}=cpu" in said) == (1, 1, True)


def test_serve_refuses_to_be_exposed_without_a_key_before_anything_starts(run, tmp_path):
    code, shown, said = run("serve", "--host", "0.0.0.0", "--data", tmp_path / "data")

    assert (code, shown) == (1, "")
    assert "REGRAFT_API_KEY" in said
    assert not (tmp_path / "data").exists()


def test_a_wrong_setting_is_named(run, monkeypatch):
    monkeypatch.setenv("REGRAFT_PORT", "many")

    code, _, said = run("migrate")

    assert code == 1
    assert said.startswith("regraft: REGRAFT_PORT: ")


def test_a_setting_that_a_check_of_our_own_refuses_is_told_in_its_words_alone(run, monkeypatch):
    monkeypatch.setenv("REGRAFT_API_KEY", "short")

    assert run("serve")[2].startswith("regraft: REGRAFT_API_KEY: a key must have at least 16 printable")


def test_a_misspelt_setting_is_told_and_what_is_somebody_elses_is_not(run, monkeypatch, tmp_path):
    monkeypatch.setenv("REGRAFT_DATABSE_URL", "postgresql://there")
    for foreign in ("REGRAFT_PORT_8080_TCP", "REGRAFT_SERVICE_HOST", "REGRAFT_URL"):
        monkeypatch.setenv(foreign, "http://127.0.0.1")

    code, _, said = run("migrate", "--data", tmp_path)

    assert code == 0
    (line,) = [line for line in said.splitlines() if "unknown setting" in line]
    assert "REGRAFT_DATABSE_URL" in line
    assert "REGRAFT_DATABASE_URL" in line


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
