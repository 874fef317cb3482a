"""Metrics for Prometheus: requests are counted as they end, gauges are read when metrics are scraped.

Each process counts its own requests. If several share a port, a scrape reaches any one of them: to monitor them, give
each its own port (docs/deployment.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector
from sqlalchemy import Connection, func, select
from sqlalchemy.exc import SQLAlchemyError
from starlette.types import Scope

from service.backfills.states import BackfillState
from service.http.operation.health import problems
from service.http.requests.dependencies import Service
from service.store.galleries.gallery import gallery_states
from service.store.tables import backfill

if TYPE_CHECKING:
    from service.runtime import Runtime

router = APIRouter()

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
QUERY = "/v1/galleries/{name}/query"
"""The route of queries; their scope has none, since they bypass the framework."""
OTHER = "other"


class RequestMetrics:
    """Counts the requests of one process by method, route and status, without names of galleries and items."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        labels = ("method", "route", "status")
        self._ended = Counter("regraft_requests", "Answered requests.", labels, registry=self.registry)
        self._seconds = Histogram(
            "regraft_request_seconds",
            "Seconds from the headers of a request to the end of its answer.",
            ("route",),
            buckets=SECONDS,
            registry=self.registry,
        )
        # By method, route and status, because the library's own lookup of labels is slow.
        self._children: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}

    def count(self, scope: Scope, status: int, seconds: float) -> None:
        """Count one request with the status of its response and its seconds."""
        labels = scope["method"], _route(scope), status
        if (children := self._children.get(labels)) is None:
            children = self._children[labels] = self._ended.labels(*labels), self._seconds.labels(labels[1])
        ended, took = children
        ended.inc()
        took.observe(seconds)


def _route(scope: Scope) -> str:
    route = getattr(scope.get("route"), "path", None)
    if route is not None:
        # The framework's path of a router's route may lack the router's prefix.
        return "/v1" + str(route).removeprefix("/v1") if scope["path"].startswith("/v1/") else str(route)
    return QUERY if scope["path"].startswith("/v1/galleries/") and scope["path"].endswith("/query") else OTHER


class Gauges(Collector):
    """The state of the service at the moment of a scrape."""

    def __init__(self, service: Runtime) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        replica = self._service.replica
        galleries = replica.all()
        now, waiting = self._read([loaded.id for loaded in galleries])
        followed = waiting is not None and replica.failure is None
        yield _gauge(
            "regraft_ready", "1: the database answers and the process follows the change feed.", float(followed)
        )
        problem_count = float(len(list(problems(self._service))))
        yield _gauge("regraft_problems", "Problems that readiness lists.", problem_count)
        yield _gauge("regraft_galleries_bytes", "Memory of the loaded galleries.", replica.cache.bytes())
        help_text = "Items by the version that serves them."
        items = GaugeMetricFamily("regraft_items", help_text, labels=("gallery", "version"))
        lag = GaugeMetricFamily(
            "regraft_feed_lag", "Changes of the feed that are not yet in memory.", labels=("gallery",)
        )
        behind = "Changes of the feed that a collection in an engine does not yet have."
        engine_lag = GaugeMetricFamily("regraft_engine_lag", behind, labels=("gallery", "version", "origin"))
        for loaded in galleries:
            for version, count in loaded.gallery.items_by_version().items():
                items.add_metric((loaded.name, version), count)
            for place, shard in loaded.gallery.remote.shards().items():
                engine_lag.add_metric((loaded.name, *place), max(loaded.seq - shard.covered_seq, 0))
            if loaded.id in now:
                lag.add_metric((loaded.name,), max(now[loaded.id][0] - 1 - loaded.seq, 0))
        yield items
        yield lag
        yield engine_lag
        if waiting is not None:
            yield _gauge("regraft_backfill_items_waiting", "Items that running backfills still have to move.", waiting)

    def _read(self, gallery_ids: Sequence[int]) -> tuple[Mapping[int, tuple[int, int | None]], int | None]:
        """The `gallery_states` of galleries, and the `backlog`; empty and None if the database does not answer."""
        try:
            with self._service.database.lookup() as connection:
                return gallery_states(connection, gallery_ids) if gallery_ids else {}, backlog(connection)
        except SQLAlchemyError:
            return {}, None


def backlog(connection: Connection) -> int:
    """Items that running backfills have planned and not settled, by which workers can be scaled."""
    settled = backfill.c.done + backfill.c.skipped + backfill.c.failed
    counted = select(func.coalesce(func.sum(backfill.c.total - settled), 0))
    return int(connection.execute(counted.where(backfill.c.state == BackfillState.RUNNING)).scalar_one())


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, help_text, value=value)


@router.get("/metrics", include_in_schema=False)
async def metrics(request: Request, service: Service) -> Response:
    """Get metrics in Prometheus's text format; requires the API key."""
    # Not on the threads of requests, so that metrics are available while all requests wait.
    text = await asyncio.to_thread(_exposition, request.app.metrics, service)
    return Response(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)


def _exposition(requests: RequestMetrics, service: Runtime) -> bytes:
    gauges = CollectorRegistry()
    gauges.register(Gauges(service))
    return generate_latest(requests.registry) + generate_latest(gauges)
