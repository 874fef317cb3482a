"""Settings that `serve`, `worker` and `migrate` refuse: one line that names the variable, before anything starts."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _free_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """`serve` looks at its port first, and the default one may be taken by a service of whoever runs the tests."""
    monkeypatch.setenv("REGRAFT_PORT", "0")


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
    monkeypatch.setattr("service.store.database.migration.upgrade", lambda settings: False)

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
    assert line.startswith("warning: ")
    assert "REGRAFT_DATABSE_URL" in line
    assert "REGRAFT_DATABASE_URL" in line
