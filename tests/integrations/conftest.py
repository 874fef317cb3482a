"""A real server for the stores of the frameworks, and how their own suites run here."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Iterator
from typing import Any

import pytest

from regraft import Client
from service.settings import Settings
from staging.api.served import names, serving
from staging.inputs.embedding_models import TextModel
from staging.shortcuts import migrated_once, verified_here

os.environ.setdefault("HAYSTACK_TELEMETRY_ENABLED", "False")
os.environ.setdefault("LANGSMITH_TRACING", "false")


def pytest_configure(config: pytest.Config) -> None:
    """The suites of frameworks mark tests for plugins that are not used here."""
    for marker in ("asyncio", "benchmark", "vcr"):
        config.addinivalue_line("markers", f"{marker}: of a plugin that the suites of frameworks use")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: Any) -> bool | None:
    """Coroutines among the suites' tests run to their end, without a plugin for it."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    wanted = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in wanted}))
    return True


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A service without versions, which takes at most 20 kB of JSON in a request."""
    data = tmp_path_factory.mktemp("integrations") / "data"
    with verified_here(), migrated_once(), serving(Settings(data=data, max_json_bytes=20_000)) as running:
        yield running.url


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with Client(url) as made:
        yield made


@pytest.fixture
def name() -> str:
    """Of a gallery that is not there yet."""
    return next(names)


@pytest.fixture
def models() -> tuple[TextModel, TextModel]:
    """An old model of 8 numbers and a new one of 10, which see the same."""
    return TextModel(8, 1), TextModel(10, 2)
