"""Client methods for upgrades of a gallery: evaluation sets, gates, deployments, retirement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from regraft import inputs
from regraft.connection import Connection, Json, read
from regraft.inputs import Vectors
from regraft.models import (
    DeploymentAnswer,
    DeploymentDetail,
    DeploymentInfo,
    DeploymentList,
    EvaluationInfo,
    EvaluationList,
    GateList,
    GateReport,
    RetireResult,
    RollbackResult,
)
from regraft.paths import change_params, delete_params, limit_params, path_of
from regraft.routes.route import route

Answered = TypeVar("Answered", bound=DeploymentAnswer)


class UpgradeRoutes(Connection):
    """Routes below /v1/galleries/{gallery} for the upgrade to another version.

    Every change takes `dry_run`, which only returns the effect. Changes of deployments take `if_match`, the `etag` of
    an earlier answer: the change is refused (412) if there was another one since.
    """

    @route
    async def evaluations(self, gallery: str) -> list[EvaluationInfo]:
        """GET /v1/galleries/{gallery}/evaluations."""
        return (await self._ask(EvaluationList, "GET", path_of("galleries", gallery, "evaluations"))).evaluations

    @route
    async def evaluation(self, gallery: str, evaluation: int) -> EvaluationInfo:
        """GET /v1/galleries/{gallery}/evaluations/{evaluation}."""
        return await self._ask(EvaluationInfo, "GET", path_of("galleries", gallery, "evaluations", evaluation))

    @route
    async def add_evaluation(
        self,
        gallery: str,
        entries: Sequence[Mapping[str, Any]],
        *,
        images: Sequence[bytes] = (),
        embeddings: Mapping[str, Vectors] | None = None,
        name: str = "",
        dry_run: bool = False,
    ) -> EvaluationInfo:
        """POST /v1/galleries/{gallery}/evaluations: entries {label, metadata}, with one image each, or with embeddings.

        `embeddings`: version -> embeddings in the order of the entries, for all versions to compare. Without images and
        embeddings, each entry has a `text`. Instead of a label, `relevant` lists the relevant items of the gallery.
        """
        if embeddings is not None:
            listed = {version: inputs.vectors(rows, f"embeddings[{version!r}]") for version, rows in embeddings.items()}
            content: Json = {"json": {"name": name, "entries": [dict(e) for e in entries], "embeddings": listed}}
        elif any("text" in entry for entry in entries):
            content = {"json": {"name": name, "entries": [dict(e) for e in entries]}}
        else:
            described = inputs.as_json([{**entry, "image": str(n)} for n, entry in enumerate(entries)])
            pictures = inputs.images(images)
            files = [("images", (str(n), picture, "application/octet-stream")) for n, picture in enumerate(pictures)]
            content = {"data": {"name": name, "entries": described}, "files": files}
        path = path_of("galleries", gallery, "evaluations")
        return await self._ask(EvaluationInfo, "POST", path, params=change_params(dry_run), **content)

    @route
    async def delete_evaluation(self, gallery: str, evaluation: int, *, dry_run: bool = False) -> None:
        """DELETE /v1/galleries/{gallery}/evaluations/{evaluation}."""
        path, params = path_of("galleries", gallery, "evaluations", evaluation), delete_params(evaluation, dry_run)
        if dry_run:
            await self._send("DELETE", path, params=params)  # answered by a description of the set
        else:
            await self._delete(path, params=params)

    @route
    async def gate(
        self,
        gallery: str,
        version: str,
        label: str | None = None,
        *,
        evaluation: int | None = None,
        slice_by: str | None = None,
        sample: int = 1000,
        metric: str | None = None,
        far: float = 0.01,
        k: int = 10,
        seed: int = 0,
        dry_run: bool = False,
    ) -> GateReport:
        """POST /v1/galleries/{gallery}/gates: measure `version` on stored items, by metadata `label`, or on a set."""
        body: Json = {"version": version, "label": label, "evaluation": evaluation, "slice": slice_by}
        body |= {"sample": sample, "metric": metric, "far": far, "k": k, "seed": seed}
        return await self._ask(
            GateReport, "POST", path_of("galleries", gallery, "gates"), params=change_params(dry_run), json=body
        )

    @route
    async def gates(self, gallery: str, *, limit: int | None = None) -> list[GateReport]:
        """GET /v1/galleries/{gallery}/gates: all, or the newest `limit`, oldest first."""
        path = path_of("galleries", gallery, "gates")
        return (await self._ask(GateList, "GET", path, params=limit_params(limit))).gates

    @route
    async def gate_report(self, gallery: str, gate: int) -> GateReport:
        """GET /v1/galleries/{gallery}/gates/{gate}."""
        return await self._ask(GateReport, "GET", path_of("galleries", gallery, "gates", gate))

    @route
    async def gate_page(self, gallery: str, gate: int) -> str:
        """GET /v1/galleries/{gallery}/gates/{gate}/page: the report as HTML with plots."""
        return str((await self._send("GET", path_of("galleries", gallery, "gates", gate, "page"))).text)

    @route
    async def deploy(
        self,
        gallery: str,
        version: str,
        *,
        gate: int | None = None,
        override: str | None = None,
        until: str = "current",
        reason: str = "",
        shadow: Mapping[str, Any] | None = None,
        canary: Mapping[str, Any] | None = None,
        dry_run: bool = False,
        if_match: str | None = None,
    ) -> DeploymentInfo:
        """POST /v1/galleries/{gallery}/deployments: make `version` current, or deploy as far as `until`.

        `override`: the reason to deploy despite a refusal. `shadow`: {share}; `canary`: {share, max_error_rate,
        max_p99_ms, min_queries}.
        """
        body: Json = {"version": version, "gate": gate, "override": override, "until": until, "reason": reason}
        body |= _trials(shadow, canary)
        return await self._change(DeploymentInfo, path_of("galleries", gallery, "deployments"), body, dry_run, if_match)

    @route
    async def deployments(self, gallery: str, *, limit: int | None = None) -> list[DeploymentInfo]:
        """GET /v1/galleries/{gallery}/deployments: all, or the newest `limit`, oldest first."""
        path = path_of("galleries", gallery, "deployments")
        return (await self._ask(DeploymentList, "GET", path, params=limit_params(limit))).deployments

    @route
    async def deployment(self, gallery: str, deployment: int) -> DeploymentDetail:
        """GET /v1/galleries/{gallery}/deployments/{deployment}: its steps, trial numbers, and `etag`."""
        return await self._request_with_etag(
            DeploymentDetail, "GET", path_of("galleries", gallery, "deployments", deployment)
        )

    @route
    async def advance(
        self,
        gallery: str,
        deployment: int,
        to: str,
        *,
        gate: int | None = None,
        override: str | None = None,
        reason: str = "",
        shadow: Mapping[str, Any] | None = None,
        canary: Mapping[str, Any] | None = None,
        dry_run: bool = False,
        if_match: str | None = None,
    ) -> DeploymentInfo:
        """POST /v1/galleries/{gallery}/deployments/{deployment}/advance: take the step `to`; see `deploy`."""
        body: Json = {"to": to, "gate": gate, "override": override, "reason": reason}
        body |= _trials(shadow, canary)
        path = path_of("galleries", gallery, "deployments", deployment, "advance")
        return await self._change(DeploymentInfo, path, body, dry_run, if_match)

    @route
    async def rollback(
        self,
        gallery: str,
        reason: str = "",
        *,
        force: bool = False,
        dry_run: bool = False,
        if_match: str | None = None,
    ) -> RollbackResult:
        """POST /v1/galleries/{gallery}/rollback: end the pending deployment, or return to the previous version.

        Refused (409 `reach_lost`) without `force` if items would be unreachable; `out_of_reach` counts them.
        """
        body = {"reason": reason, "force": force}
        return await self._change(RollbackResult, path_of("galleries", gallery, "rollback"), body, dry_run, if_match)

    @route
    async def retire(
        self, gallery: str, version: str, reason: str = "", *, dry_run: bool = False, if_match: str | None = None
    ) -> RetireResult:
        """POST /v1/galleries/{gallery}/retire: delete a version's embeddings; returns their number and bytes."""
        body = {"version": version, "reason": reason}
        return await self._change(RetireResult, path_of("galleries", gallery, "retire"), body, dry_run, if_match)

    async def _change(
        self, answer: type[Answered], path: str, body: Json, dry_run: bool, if_match: str | None
    ) -> Answered:
        headers = {"If-Match": if_match} if if_match else {}
        return await self._request_with_etag(
            answer, "POST", path, params=change_params(dry_run), json=body, headers=headers
        )

    async def _request_with_etag(self, answer: type[Answered], method: str, path: str, **request: Any) -> Answered:
        response = await self._send(method, path, **request)
        return read(answer, response.content).model_copy(update={"etag": response.headers.get("etag")})


def _trials(shadow: Mapping[str, Any] | None, canary: Mapping[str, Any] | None) -> Json:
    """The fields of the requested trials."""
    asked = {"shadow": shadow, "canary": canary}
    return {name: dict(options) for name, options in asked.items() if options is not None}
