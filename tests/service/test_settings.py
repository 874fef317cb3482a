from __future__ import annotations

import stat
from pathlib import Path

import pytest
from PIL import Image
from pydantic import ValidationError

from service.settings import Settings
from service.store.database.migration import upgrade


def test_everything_lies_in_the_data_folder_unless_told_otherwise(tmp_path: Path) -> None:
    settings = Settings(data=tmp_path)

    assert settings.database_url == f"sqlite:///{tmp_path}/regraft.db"
    assert settings.blobs_url == f"file://{tmp_path}/blobs"
    assert settings.versions == tmp_path / "versions"
    elsewhere = Settings(data=tmp_path, database_url="postgresql://x/y", blobs_url="s3://bucket/images")
    assert (elsewhere.database_url, elsewhere.blobs_url) == ("postgresql+psycopg://x/y", "s3://bucket/images")


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
def test_a_database_is_named_as_any_program_of_postgresql_does(scheme: str) -> None:
    assert Settings(database_url=f"{scheme}://me@there/db").database_url == "postgresql+psycopg://me@there/db"


@pytest.mark.parametrize("name", ["a b", "a?b", "a%20b", "a#b", "ä@:b"])
def test_the_database_lies_in_the_data_folder_whatever_its_name(tmp_path: Path, name: str) -> None:
    upgrade(Settings(data=tmp_path / name))

    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name / "regraft.db").is_file()


def test_a_new_data_folder_is_closed_to_other_users_and_an_existing_one_stays_as_it_is(tmp_path: Path) -> None:
    (shared := tmp_path / "shared").mkdir(mode=0o755)
    for folder in (shared, tmp_path / "new"):
        upgrade(Settings(data=folder))

    assert stat.filemode((tmp_path / "new").stat().st_mode) == "drwx------"
    assert stat.filemode(shared.stat().st_mode) == "drwxr-xr-x"


def test_the_environment_sets_every_field(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "PORT": "99",
        "DATA": "/somewhere",
        "API_KEY": "sixteen letters.",
        "LEASE_SECONDS": "1.5",
    }.items():
        monkeypatch.setenv(f"REGRAFT_{name}", value)

    settings = Settings()

    assert (settings.port, settings.data, settings.lease_seconds) == (99, Path("/somewhere"), 1.5)
    assert settings.api_key is not None
    assert settings.api_key.get_secret_value() == "sixteen letters."


def test_each_request_at_once_may_change_something_by_default() -> None:
    assert Settings().connections // 2 >= Settings().threads


def test_it_listens_on_this_machine_only_by_default() -> None:
    assert Settings().host == "127.0.0.1"


@pytest.mark.parametrize("field", ["port", "max_batch", "threads", "poll_seconds", "lease_seconds", "max_image_pixels"])
def test_senseless_values_are_refused(field: str) -> None:
    with pytest.raises(ValidationError, match=field):
        Settings(**{field: -1})


@pytest.mark.parametrize(
    ("size", "count"), [("8GiB", 8 << 30), (" 1.5 tb ", 1_500_000_000_000), ("1000", 1000), ("2g", 2 * 10**9)]
)
def test_memory_is_a_number_with_a_unit(monkeypatch: pytest.MonkeyPatch, size: str, count: int) -> None:
    monkeypatch.setenv("REGRAFT_MEMORY", size)

    assert Settings().memory == count


@pytest.mark.parametrize("size", ["50%", "8,5GiB", "8.GiB", "8GiB/2", "8 GiB 1", "1_000", "GiB", ""])
def test_no_part_of_a_size_is_ignored(monkeypatch: pytest.MonkeyPatch, size: str) -> None:
    monkeypatch.setenv("REGRAFT_MEMORY", size)

    with pytest.raises(ValidationError, match="memory"):
        Settings()


def test_no_more_pixels_are_promised_than_pillow_opens() -> None:
    assert Image.MAX_IMAGE_PIXELS is not None
    most = 2 * Image.MAX_IMAGE_PIXELS
    assert Settings(max_image_pixels=most).max_image_pixels == most
    with pytest.raises(ValidationError, match="max_image_pixels"):
        Settings(max_image_pixels=most + 1)


@pytest.mark.parametrize("value", ["inf", "nan", "1e10"])
@pytest.mark.parametrize("field", [name for name, f in Settings.model_fields.items() if f.annotation is float])
def test_a_duration_is_one_that_can_be_waited_for(monkeypatch: pytest.MonkeyPatch, field: str, value: str) -> None:
    monkeypatch.setenv(f"REGRAFT_{field.upper()}", value)

    with pytest.raises(ValidationError, match=field):
        Settings()


@pytest.mark.parametrize("uri", ["milvus:19530", "ftp://milvus", "http://", "http://a b", "see http://milvus"])
def test_what_is_no_uri_of_a_milvus_is_refused(uri: str) -> None:
    assert Settings(milvus_uri="http://milvus:19530/name").milvus_uri
    with pytest.raises(ValidationError, match="milvus_uri"):
        Settings(milvus_uri=uri)


@pytest.mark.parametrize("url", ["vectors:5432", "mysql://a/b", "postgresql+asyncpg://a/b", " postgresql://a/b"])
def test_what_is_no_url_of_a_postgresql_is_refused(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    for good in ("", "postgres://me:word@a/b", "postgresql://a,b:5433/c", "postgresql+psycopg://me@/b?host=/run"):
        assert Settings(pgvector_url=good).pgvector_url == good
    monkeypatch.setenv("REGRAFT_PGVECTOR_URL", url)

    with pytest.raises(ValidationError, match="pgvector_url"):
        Settings()


def test_settings_do_not_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Settings().port = 1  # type: ignore[misc]
