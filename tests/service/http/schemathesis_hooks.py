"""What schemathesis does to each request it has drawn: names and numbers that are legal mostly become real ones.

It is loaded by schemathesis (`schemathesis.toml`), which draws legal numbers and names that nothing has. What is real
is in the file that the environment variable `REAL` names: by operation or path of the API the parameters that belong
together, by operation a whole body, by field of other bodies its values.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from random import Random
from typing import Any

import schemathesis
from schemathesis import Case, HookContext
from schemathesis.core.parameters import ParameterLocation

REAL = json.loads(Path(os.environ["REAL"]).read_text())
UNKNOWN = 0.15
"""The share of names and numbers that stay as they were drawn."""
WHOLE = 0.35
"""The share of legal bodies that become one that the service takes."""
CARRIED_OUT = 0.5
"""The share of those that are no dry run, whatever was drawn."""


@schemathesis.hook
def before_call(context: HookContext, case: Case[Any], kwargs: dict[str, Any]) -> None:
    """Put something real in the place of what is only legal; the same request always becomes the same."""
    draw = Random(repr((case.operation.label, case.path_parameters, case.query, case.body)))
    known = REAL["paths"].get(case.operation.label) or REAL["paths"].get(case.path)
    # What a link leads to may be something real that others need: only what is spare is deleted.
    real = case.method == "DELETE" or draw.random() > UNKNOWN
    if known and _legal(case, ParameterLocation.PATH) and real:
        named = draw.choice(known)
        case.path_parameters = {name: value for name, value in named.items() if f"{{{name}}}" in case.path}
        if _legal(case, ParameterLocation.QUERY):
            case.query = {**case.query, **{k: v for k, v in named.items() if k not in case.path_parameters}}
    if _legal(case, ParameterLocation.QUERY):
        _mean_something(case)
    if _legal(case, ParameterLocation.HEADER) and draw.random() > UNKNOWN:
        case.headers.pop("if-match", None)  # no ETag that was drawn is the newest
    whole = REAL["bodies"].get(case.operation.label) if case.media_type == "application/json" else None
    if whole and _legal(case, ParameterLocation.BODY) and draw.random() < WHOLE:
        case.body = whole
        _carry_out(case, draw)
    elif isinstance(case.body, dict) and _legal(case, ParameterLocation.BODY):
        for name in sorted(REAL["fields"].keys() & case.body.keys()):
            if isinstance(case.body[name], str) and draw.random() > UNKNOWN:
                case.body[name] = draw.choice(REAL["fields"][name])
        if case.body.get("new") == case.body.get("old") in REAL["fields"]["new"]:
            case.body["old"] = next(name for name in REAL["fields"]["old"] if name != case.body["new"])


def _carry_out(case: Case[Any], draw: Random) -> None:
    """Make a change of what may have been drawn as a dry run."""
    if _legal(case, ParameterLocation.QUERY) and draw.random() < CARRIED_OUT:
        case.query = {name: value for name, value in (case.query or {}).items() if name != "dry_run"}


def _mean_something(case: Case[Any]) -> None:
    """What a schema cannot say of a query: it confirms its path or item, forces for a reason, goes on from a page."""
    query = case.query or {}
    if "confirm" in query:
        name, follows = case.path.rpartition("{")[2].split("}")
        # A deletion of the image of `a`, which no route has, is that of the item `a/image`.
        query["confirm"] = str(case.path_parameters[name]) + (follows if case.method == "DELETE" else "")
    if "cursor" in query:
        query["cursor"] = ""
    if "force" in query:
        query["reason"] = "drawn"


def _legal(case: Case[Any], where: ParameterLocation) -> bool:
    return case.meta is None or not case.meta.is_negative_at(where)
