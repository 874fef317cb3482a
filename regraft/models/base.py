"""What every answer of the API is, and what several of them share."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class ApiModel(BaseModel):
    """An answer of the service, as it writes and as the client reads it; it does not change once it is made.

    A field that this release does not know is left out, so that a client goes on with a service newer than itself. A
    field that is missing is an error: a new field has a default where an older service may be asked.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)


class ScoreInterval(ApiModel):
    """A metric with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float
