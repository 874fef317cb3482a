"""`regraft gate`, `deploy`, `deployment`, `rollback` and `retire`: change a gallery's version."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from index.errors import InvalidArgument
from index.version import EdgeKind
from regraft.client import Client, Json
from regraft.models import DeploymentInfo, GateReport
from regraft.terminal.answers import answer, err, out
from regraft.terminal.command import Commands
from regraft.terminal.options import DryRun, Gallery, Newest
from regraft.terminal.printing import print_fields, print_table, score, would

deployment = Commands(no_args_is_help=True, help="Show deployments and advance them.")

Number = Annotated[int, typer.Argument(metavar="DEPLOYMENT", help="Number of the deployment.")]
Gate = Annotated[int | None, typer.Option(help="Number of the gate report.", show_default=False)]
Override = Annotated[str | None, typer.Option(help="Reason to deploy despite a refusal.", show_default=False)]
Share = Annotated[
    float | None, typer.Option(help="Shadow or canary: share of the queries, above 0 and up to 1.", show_default=False)
]
MaxErrorRate = Annotated[
    float | None, typer.Option(help="Canary: roll back above this share of failed queries.", show_default=False)
]
MaxP99 = Annotated[
    float | None,
    typer.Option("--max-p99-ms", help="Canary: roll back above this p99 latency of its queries.", show_default=False),
]
MinQueries = Annotated[
    int | None, typer.Option(help="Canary: number of queries before the limits apply.", show_default=False)
]
Reason = Annotated[str, typer.Option(help="Reason, kept with the deployment.")]
Version = Annotated[str, typer.Argument(metavar="VERSION", help="Name of a registered version.")]


def gate(
    client: Client,
    name: Gallery,
    version: Version,
    label: Annotated[
        str | None,
        typer.Option(help="Metadata field with the label of each item.", show_default=False),
    ] = None,
    evaluation: Annotated[
        int | None, typer.Option(help="Number of the evaluation set to measure on.", show_default=False)
    ] = None,
    slice_by: Annotated[
        str | None, typer.Option("--slice", help="Metadata field: also measure each of its values.", show_default=False)
    ] = None,
    sample: Annotated[
        int,
        typer.Option(min=2, help="Maximum number of queries, without --evaluation; they search all items if possible."),
    ] = 1000,
    metric: Annotated[
        str | None,
        typer.Option(help="cmc@1, cmc@5, mAP@1.0, TAR@FAR, or recall@k (needs no labels).", show_default=False),
    ] = None,
    far: Annotated[float, typer.Option(help="For TAR@FAR: allowed rate of false accepts.")] = 0.01,
    k: Annotated[int, typer.Option("-k", help="For recall@k: number of matches.")] = 10,
    seed: Annotated[int, typer.Option(help="Seed of the sample and the bootstrap.")] = 0,
    page: Annotated[
        Path | None, typer.Option(help="Also write the report to this HTML file.", show_default=False)
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Measure a version against the current one; code 1: refused.

    Example: regraft gate photos v2 --label label --page gate.html
    """
    if dry_run and page is not None:
        raise InvalidArgument("--page cannot be used with --dry-run, which keeps no report", pointer="/page")
    if page is not None and not page.parent.is_dir():
        raise InvalidArgument(f"the folder {page.parent} does not exist", pointer="/page")
    report = client.gate(
        name,
        version,
        label,
        evaluation=evaluation,
        slice_by=slice_by,
        sample=sample,
        metric=metric,
        far=far,
        k=k,
        seed=seed,
        dry_run=dry_run,
    )
    answer(report)
    _print_report(report)
    if page is not None and report.id is not None:
        page.write_text(client.gate_page(name, report.id), encoding="utf-8")
    if report.verdict == "refuse":
        raise typer.Exit(1)


def deploy(
    client: Client,
    name: Gallery,
    version: Version,
    gate: Gate = None,
    override: Override = None,
    until: Annotated[
        str, typer.Option(help="Last state: registered, verified, gated, shadow, canary or current.")
    ] = "current",
    share: Share = None,
    max_error_rate: MaxErrorRate = None,
    max_p99_ms: MaxP99 = None,
    min_queries: MinQueries = None,
    reason: Reason = "",
    dry_run: DryRun = False,
) -> None:
    """Deploy a version: once it is current, every query uses it.

    Example: regraft deploy photos v2 --until canary --share 0.1 --max-error-rate 0.01
    """
    trial = _trial(until, share, max_error_rate, max_p99_ms, min_queries)
    deployed = client.deploy(
        name,
        version,
        gate=gate,
        override=override,
        until=until,
        reason=reason,
        dry_run=dry_run,
        shadow=trial.get("shadow"),
        canary=trial.get("canary"),
    )
    _print_deployment(name, deployed)


@deployment.command("list")
def list_deployments(client: Client, name: Gallery, limit: Newest = None) -> None:
    """List a gallery's deployments."""
    fields = ["id", "version", "previous", "state", "gate", "activated", "reason"]
    print_fields(client.deployments(name, limit=limit), fields)


@deployment.command("show")
def show(client: Client, name: Gallery, number: Number) -> None:
    """Show a deployment's steps and the counts of its shadow or canary."""
    found = client.deployment(name, number)
    answer(found)
    out.print(f"{name}: deployment {number} of {found.version} is {found.state}")
    rows = [
        [time.strftime("%F %T", time.localtime(s.at)), s.after, s.who, s.why, _counted(s.evidence)]
        for s in found.transitions
    ]
    print_table(["when", "step", "who", "why", "evidence"], rows)
    for phase, counted in found.trial.items():
        print_table(
            [phase, ""], [[field, _counted(value)] for field, value in counted.items() if field != "last_errors"]
        )


@deployment.command("advance")
def advance(
    client: Client,
    name: Gallery,
    number: Number,
    to: Annotated[str, typer.Argument(metavar="STATE", help="Next state: verified, gated, shadow, canary or current.")],
    gate: Gate = None,
    override: Override = None,
    share: Share = None,
    max_error_rate: MaxErrorRate = None,
    max_p99_ms: MaxP99 = None,
    min_queries: MinQueries = None,
    reason: Reason = "",
    dry_run: DryRun = False,
) -> None:
    """Move a deployment to its next state."""
    trial = _trial(to, share, max_error_rate, max_p99_ms, min_queries)
    deployed = client.advance(
        name,
        number,
        to,
        gate=gate,
        override=override,
        reason=reason,
        dry_run=dry_run,
        shadow=trial.get("shadow"),
        canary=trial.get("canary"),
    )
    _print_deployment(name, deployed)


def rollback(
    client: Client,
    name: Gallery,
    reason: Reason = "",
    force: Annotated[bool, typer.Option("--force", help="Roll back even if items become unreachable.")] = False,
    dry_run: DryRun = False,
) -> None:
    """End the deployment in progress, or return to the last version."""
    deployed = client.rollback(name, reason, force=force, dry_run=dry_run)
    _print_deployment(name, deployed)
    for version, items in deployed.out_of_reach.items():
        err.print(f"unreachable: {items} items of {version}")


def retire(client: Client, name: Gallery, version: Version, reason: Reason = "", dry_run: DryRun = False) -> None:
    """Delete the embeddings of a version that no item depends on."""
    freed = client.retire(name, version, reason, dry_run=dry_run)
    answer(freed)
    done = would(dry_run, "freed", "free")
    out.print(f"{name}: {done} {freed.embeddings} embeddings of {version}, {freed.bytes} bytes")


def _trial(
    state: str, share: float | None, rate: float | None, p99: float | None, least: int | None
) -> dict[str, Json]:
    """The given settings of a shadow or canary. Raises BadParameter if they do not apply."""
    given = {"share": share, "max_error_rate": rate, "max_p99_ms": p99, "min_queries": least}
    settings = {field: value for field, value in given.items() if value is not None}
    legal = {"shadow": {"share"}, "canary": set(given)}.get(state, set())
    for field in settings:
        if field not in legal:
            option, takes = f"--{field.replace('_', '-')}", "shadow or canary" if field == "share" else "canary"
            raise typer.BadParameter(f"{option} requires the state {takes}, not {state}")
    return {state: settings} if settings else {}


def _counted(value: object) -> str:
    if isinstance(value, dict):
        shown = ((field, inner) for field, inner in value.items() if inner not in (None, [], {}))
        return ", ".join(f"{field} {_counted(inner)}" for field, inner in shown)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _print_report(report: GateReport) -> None:
    number = "(dry run)" if report.id is None else report.id
    out.print(f"gate {number}: {report.current} -> {report.version}, verdict {report.verdict}")
    measured = {name: getattr(report, name) for name in ("old_old", "new_old", "new_new", "difference")}
    rows = [[name, score(value)] for name, value in measured.items() if value is not None]
    print_table([report.metric, "value [95 % interval]"], rows)
    side = "all comparable items" if report.whole else "a sample"
    out.print(f"{report.queries} queries over {report.items} items ({side}), seed {report.seed}")
    if report.unlabelled:
        out.print(f"{report.unlabelled} entries without a label left out")
    for one in report.slices[:3]:
        name = json.loads(one.value)  # strings without quotes
        shown = name if isinstance(name, str) else one.value
        out.print(f"{report.slice} {shown}: {one.old_old:.1%} -> {one.new_old:.1%} ({one.queries} queries)")
    for note in _gate_notes(report):
        err.print(note)


def _gate_notes(report: GateReport) -> Iterator[str]:
    """Why the verdict is not `pass`, and a backfill that would make answers worse, which no verdict regards."""
    if report.verdict == "refuse":
        yield f"{report.version} would lower {report.metric}"
    elif report.verdict == "warn":
        if report.route == [EdgeKind.DUAL]:
            yield (
                f"no edge leads from {report.version} to {report.current}, which still embeds the queries for its "
                "items, so no answer changes until a backfill"
            )
        elif report.difference.low <= 0 <= report.difference.high:
            yield f"it is uncertain whether {report.version} raises {report.metric}: the difference may be 0"
        elif worse := sum(part.difference.high < 0 for part in report.slices):
            yield f"{report.metric} falls for {worse} of {len(report.slices)} values of {report.slice}"
        else:
            yield "there are too few queries, or too few false accepts, for another verdict"
    best = report.new_new if report.new_new_items in {None, report.items} else None
    if best is not None and best.high < report.old_old.low:
        yield f"note: a backfill would lower {report.metric} from {report.old_old.value:.1%} to {best.value:.1%}"


def _print_deployment(name: str, deployed: DeploymentInfo) -> None:
    answer(deployed)
    back = f", {deployed.activated} items switched to stored embeddings" if deployed.activated else ""
    state = "" if deployed.state == "current" else f" is {deployed.state}"
    would = "" if deployed.id else " (dry run)"
    out.print(f"{name}: {deployed.previous or 'nothing'} -> {deployed.version}{state}{back}{would}")
    for note in deployed.notes:
        err.print(f"note: {note}")
