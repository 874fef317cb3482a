"""The base of all answers of the API, and models that several of them use."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class ApiModel(BaseModel):
    """An answer of the service, immutable; the service writes it and the client parses it.

    Unknown fields are ignored, so that a client works with a newer service. A missing field is an error: new fields
    need defaults, so that a client works with an older service.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)


class ScoreInterval(ApiModel):
    """A metric with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float
