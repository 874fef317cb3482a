"""Nothing can be used that the documentation does not name."""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from packaging.requirements import Requirement
from typer.core import TyperCommand, TyperGroup

import regraft
from regraft.cli import app
from regraft.client import Client
from service.http.app import create_app
from service.http.operation import health
from service.settings import Settings

ROOT = Path(__file__).parent.parent.parent


def commands(command: TyperCommand | TyperGroup, path: str = "regraft") -> Iterator[tuple[str, TyperCommand]]:
    if isinstance(command, TyperCommand):
        yield path, command
        return
    for name, child in command.commands.items():
        yield from commands(child, f"{path} {name}")


COMMANDS = dict(commands(typer.main.get_group(app)))


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_and_its_own_options_are_documented(command):
    (line,) = [x for x in (ROOT / "docs/commands.md").read_text().splitlines() if re.match(rf"\| `{command}[ `]", x)]
    shared = {"--url", "--api-key", "--timeout", "--help", "--json"}

    options = {o for p in COMMANDS[command].params if p.param_type_name == "option" for o in p.opts} - shared

    assert {o for o in options if f"[{o}" not in line and f"{o} " not in line} == set()


@pytest.mark.parametrize("name", Settings.model_fields)
def test_each_setting_is_documented(name):
    assert f"| `REGRAFT_{name.upper()}`" in (ROOT / "docs/settings.md").read_text()


def test_no_setting_is_documented_that_does_not_exist():
    documented = re.findall(r"^\| `REGRAFT_(\w+)`", (ROOT / "docs/settings.md").read_text(), re.MULTILINE)

    assert {name.lower() for name in documented} == set(Settings.model_fields)


METHOD = "(?:GET|POST|PUT|PATCH|DELETE)"
API = create_app(Settings()).openapi()
ROUTES = [f"{method.upper()} {path}" for path, operations in API["paths"].items() for method in operations]


def documented_routes() -> set[str]:
    text = (ROOT / "docs/http-api.md").read_text()
    return {route.split("?")[0] for route in re.findall(rf"^\| `({METHOD} /v1[^ `]*)", text, re.MULTILINE)}


@pytest.mark.parametrize("route", ROUTES)
def test_each_route_is_documented(route):
    assert route in documented_routes()


def test_no_route_is_documented_that_does_not_exist():
    assert documented_routes() == set(ROUTES)


def test_each_code_of_what_the_service_lacks_is_documented():
    codes = re.findall(r"\w+_\w+|draining", API["components"]["responses"]["Problem503"]["description"])
    text = (ROOT / "docs/http-api.md").read_text()

    assert "storage_full" in codes
    assert [code for code in codes if f"`{code}`" not in text] == []


def test_the_client_has_a_method_for_each_route():
    members = inspect.getmembers(Client)
    methods = "".join(method.__doc__ for name, method in members if name[0] != "_" and method.__doc__)
    spoken = {re.sub(r"{\w+}", "{}", route) for route in re.findall(rf"{METHOD} /v1[^ ,.;]*", methods)}

    assert {re.sub(r"{\w+}", "{}", route) for route in ROUTES} <= {route.rstrip(":") for route in spoken}


def test_the_makefile_has_the_promised_targets():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))

    assert {"demo", "serve", "test", "test-all", "check", "examples", "sizes", "help"} <= targets


def test_the_version_is_the_same_everywhere_and_in_the_changelog():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

    assert declared == regraft.__version__ == health.VERSION
    assert re.search(rf"^## {re.escape(declared)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_each_pinned_version_is_one_that_the_project_allows():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = dict(re.findall(r"^([a-z0-9-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    extras = [
        r for name, needed in project["optional-dependencies"].items() if not name.startswith("gpu") for r in needed
    ]

    for needed in map(Requirement, [r for r in [*project["dependencies"], *extras] if not r.startswith("regraft[")]):
        assert needed.specifier.contains(pins[needed.name.lower()]), needed


@pytest.mark.parametrize("package", ["service", "index", "training"])
def test_every_module_has_its_place_on_the_map(package: str):
    page = (ROOT / "docs" / "packages.md").read_text()
    table = page.partition(f"\n## `{package}/`\n")[2].partition("\n## ")[0]
    named: dict[str, set[str]] = {}
    for folder, text in re.findall(r"^\| (?:`([\w/]+)/`.*?|[^`]*?) \| (.*`.*) \|$", table, re.MULTILINE):
        named.setdefault(folder, set()).update(re.findall(r"`([a-z0-9_]+)`", text))
    found: dict[str, set[str]] = {}
    for path in (ROOT / package).rglob("*.py"):
        folder = str(path.parent.relative_to(ROOT / package)).removeprefix(".")
        found.setdefault(folder, set()).add(path.stem)

    assert named == {folder: stems - {"__init__"} for folder, stems in found.items() if stems != {"__init__"}}


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_exist(page: Path):
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text()):
        found = page.parent / target if target else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), f"{target}#{anchor}"


def test_prose_is_wrapped_so_that_changes_to_it_can_be_read():
    long = [f"{page.name}: {line[:60]}" for page in PAGES for line in page.read_text().splitlines() if len(line) > 125]

    assert [line for line in long if ": |" not in line] == []
