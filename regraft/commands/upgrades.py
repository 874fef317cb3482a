"""Changing a gallery's version: `regraft gate`, `deploy` and `rollback`."""

from __future__ import annotations

from typing import Annotated

import typer

from regraft.client import Json
from regraft.commands.options import URL, ApiKey, Gallery, Url, connect, err, out, print_table, score

Version = Annotated[str, typer.Argument(metavar="VERSION", help="Name of a registered version.")]


def gate(
    name: Gallery,
    version: Version,
    label: Annotated[str, typer.Option(help="Metadata field that says which items belong together.")] = "label",
    sample: Annotated[int, typer.Option(min=2, help="Items to measure on, at most.")] = 1000,
    metric: Annotated[str, typer.Option(help="What to compare.")] = "cmc@1",
    seed: Annotated[int, typer.Option(help="Seed of the sample and the bootstrap.")] = 0,
    url: Url = URL,
    api_key: ApiKey = None,
) -> None:
    """Measure a version against the current one; code 1: refused."""
    with connect(url, api_key) as client:
        report = client.gate(name, version, label, sample=sample, metric=metric, seed=seed)
    _print_report(report)
    if report["verdict"] == "refuse":
        raise typer.Exit(1)


def deploy(
    name: Gallery,
    version: Version,
    gate: Annotated[int | None, typer.Option(help="Number of the gate report.", show_default=False)] = None,
    override: Annotated[str | None, typer.Option(help="Why to deploy despite a refusal.", show_default=False)] = None,
    url: Url = URL,
    api_key: ApiKey = None,
) -> None:
    """Make a version current: every query uses it from now on."""
    with connect(url, api_key) as client:
        deployed = client.deploy(name, version, gate=gate, override=override)
    _print_deployment(name, deployed)


def rollback(
    name: Gallery,
    reason: Annotated[str, typer.Option(help="Kept with the deployment.")] = "",
    url: Url = URL,
    api_key: ApiKey = None,
) -> None:
    """Go back to the version that was current before."""
    with connect(url, api_key) as client:
        deployed = client.rollback(name, reason)
    _print_deployment(name, deployed)


def _print_report(report: Json) -> None:
    out.print(f"gate {report['id']}: {report['current']} -> {report['version']}, verdict {report['verdict']}")
    rows = [[name, score(report[name])] for name in ("old_old", "new_old", "new_new", "difference") if report.get(name)]
    print_table([report["metric"], "value [95 % interval]"], rows)
    if report["verdict"] == "refuse":
        err.print(f"{report['version']} would make {report['metric']} worse")


def _print_deployment(name: str, deployed: Json) -> None:
    back = f", {deployed['activated']} items back in it at once" if deployed["activated"] else ""
    out.print(f"{name}: {deployed['previous'] or 'nothing'} -> {deployed['version']}{back}")
