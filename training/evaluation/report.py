"""Files of an evaluation: a one-page HTML report of a version with inline pictures, or JSON and pictures."""

from __future__ import annotations

import base64
import importlib.util
import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from index.durable import write_whole
from index.errors import InvalidArgument
from index.evaluation.curves import CALIBRATED, RAW
from index.evaluation.scores import METRICS, compatibility
from index.version import Card, Version
from index.version_folder.folder import load_version
from index.version_folder.new_folder import check_outside
from training.data.images import Data
from training.evaluation.loss_curves import LossCurves, read_loss_curves
from training.evaluation.matches import match_table
from training.evaluation.matrix import DECIDING_METRIC, Evaluation, evaluate
from training.evaluation.plots import as_svg, bars_figure, curves_figure, learning_figure, matrix_figure
from training.evaluation.tables import as_json, interval, route

EVALUATION = "evaluation.json"
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1a1a1a; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem; margin-bottom: 0.2rem } h2 { font-size: 1.1rem; margin: 1.6rem 0 0.4rem }
table { border-collapse: collapse } th, td { text-align: left; padding: 0.15rem 1.1rem 0.15rem 0; vertical-align: top }
th { font-weight: 600; border-bottom: 1px solid #bbb } td { border-bottom: 1px solid #eee }
td code { word-break: break-all } figure { margin: 0.4rem 0 } img { max-width: 100% }
.verdict { border-left: 4px solid #7f7f7f; padding: 0.4rem 0.8rem; background: #f6f6f6 }
.verdict.yes { border-color: #009e73 } .verdict.no { border-color: #d55e00 }
.matches td { white-space: nowrap; padding-bottom: 0.3rem } .matches img { border: 3px solid #bbb; margin-right: 3px }
.matches img.right { border-color: #009e73 } .matches img.wrong { border-color: #d55e00 }
.pictures { display: flex; flex-wrap: wrap; gap: 1rem }
"""


def report_of(folder: Path) -> Path:
    """The path of a version's report: beside its folder, which holds only the files of the version."""
    return folder.with_name(f"{folder.name}-report.html")


def report_version(folder: Path, old: Version | None, data: Data) -> Path | None:
    """Measure an exported version as serving would use it, and write its report.

    Args:
        folder: the version.
        old: the version it was made compatible with.
        data: its query and gallery images are measured on.

    Returns:
        The report, or None where matplotlib is not installed.

    Raises:
        RegraftError: as `evaluate` does.
    """
    if not can_draw():
        return None
    version = load_version(folder)
    measured = evaluate([version] if old is None else [old, version], data)
    logged = read_loss_curves(folder.with_name(f"{folder.name}-logs"))
    return write_report(measured, version.name, report_of(folder), data, logged)


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def check_evaluation_folder(folder: Path) -> None:
    """Check that `write_evaluation` may write to a folder, before hours go into what it is to hold.

    Raises:
        InvalidArgument: it is no folder, or a version's, which would not match its card any more.
    """
    check_outside(folder / EVALUATION)
    if folder.exists() and not folder.is_dir():
        raise InvalidArgument(f"{folder} exists and is not a folder", pointer="/out")


def write_evaluation(measured: Evaluation, folder: Path) -> list[Path]:
    """Write evaluation.json, and where matplotlib is installed matrix.svg and curves.svg (if there are curves).

    Returns:
        The files.

    Raises:
        InvalidArgument: see `check_evaluation_folder`.
        Unwritable: the disk is full, or the like.
    """
    check_evaluation_folder(folder)
    files = {EVALUATION: json.dumps(as_json(measured), indent=2, allow_nan=False).encode() + b"\n"}
    if can_draw():
        files["matrix.svg"] = as_svg(matrix_figure(measured))
    if can_draw() and measured.curves:
        files["curves.svg"] = as_svg(curves_figure(measured))
    for name, content in files.items():
        write_whole(folder / name, content)
    return [folder / name for name in files]


def write_report(
    measured: Evaluation, name: str, path: Path, data: Data | None = None, logged: LossCurves | None = None
) -> Path:
    """Write the report of one of the versions in an evaluation; see `render_report`."""
    write_whole(path, render_report(measured, name, data, logged).encode())
    return path


def render_report(measured: Evaluation, name: str, data: Data | None = None, logged: LossCurves | None = None) -> str:
    """The report as HTML that needs no other file.

    Args:
        measured: an evaluation.
        name: one of its versions.
        data: what was measured on; with it some queries and their first matches are shown.
        logged: what the training logged; with it the learning curve is shown.
    """
    card = measured.cards[name]
    olds = [old for new, old in measured.upgrades if new == name]
    summary = (
        f"Method {card.method}, {card.dim} numbers, space {card.space['kind']}; measured on {measured.queries} queries "
        f"({measured.skipped} without a relevant item) and {measured.items} items, with 95 % bootstrap intervals."
    )
    parts = [
        f"<h1>{escape(name)}</h1>",
        *(_verdict(measured, name, old) for old in olds),
        f"<p>{escape(summary)}</p>",
        *_measurements(measured, name, olds),
        *([] if data is None else [line for old in olds for line in match_table(measured, name, old, data)]),
        *_loss_curves(logged or {}),
        "<h2>Recipe</h2>",
        _table(["field", "value"], [[key, _text_of(value)] for key, value in card.recipe.items()]),
        "<h2>Data and files</h2>",
        _table(["what", "value"], [[key, _text_of(value)] for key, value in _provenance(card)]),
    ]
    title = f"<title>{escape(name)}: report</title>"
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width">{title}<style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(parts) + "\n</body></html>\n"


def _verdict(measured: Evaluation, new: str, old: str) -> str:
    """A paragraph that says whether the new version is compatible with the old one."""
    gain = measured.upgrades[new, old].difference[DECIDING_METRIC]
    before, after = (measured.cells[pair].retrieval.mean(DECIDING_METRIC) for pair in ((old, old), (new, old)))
    verdict = compatibility(gain)
    css_class = {"compatible": "yes", "not compatible": "no"}.get(verdict, "")
    text = (
        f"{verdict.capitalize()} with {old}: queries by {new} over items of {old} find a relevant item first in "
        f"{after:.1%} of cases, {old} itself in {before:.1%}; a difference of {100 * gain.value:+.1f} points, 95 % "
        f"interval {100 * gain.low:+.1f} to {100 * gain.high:+.1f}."
    )
    if not css_class:
        text += " The interval includes 0: more queries are needed to decide."
    return f'<p class="verdict {css_class}">{escape(text)}</p>'


def _loss_curves(logged: LossCurves) -> Iterable[str]:
    if logged:
        yield "<h2>Learning</h2>"
        yield _image(as_svg(learning_figure(logged)), "Loss by epoch")


def _measurements(measured: Evaluation, name: str, olds: Sequence[str]) -> Iterable[str]:
    """The table of metrics, the bars, and for each older version what the upgrade gives."""
    pairs = [*((old, old) for old in olds), *((name, old) for old in olds), (name, name)]
    scores = {pair: [measured.cells[pair].retrieval.interval(metric) for metric in METRICS] for pair in pairs}
    yield "<h2>Retrieval</h2>"
    yield _table(
        ["queries/items", "edges", *METRICS],
        [["/".join(p), route(measured.cells[p].kinds), *map(interval, scores[p])] for p in pairs],
    )
    yield '<div class="pictures">'
    yield _image(as_svg(bars_figure([("/".join(p), scores[p]) for p in pairs])), "Retrieval by pair of versions")
    if measured.curves:
        yield _image(as_svg(curves_figure(measured)), f"{measured.metric} while items are moved")
    yield "</div>"
    for old in olds:
        yield from _upgrade(measured, name, old)


def _upgrade(measured: Evaluation, new: str, old: str) -> Iterable[str]:
    upgrade = measured.upgrades[new, old]
    yield f"<h2>{escape(new)} over {escape(old)}</h2>"
    rows = [[f"new/old - old/old, {metric}", interval(upgrade.difference[metric])] for metric in METRICS]
    rows += [[f"P_com, {metric}", interval(score)] for metric, score in upgrade.p_com.items()]
    rows += [
        ["queries right before and wrong now", f"{upgrade.flips}: share {interval(upgrade.flip_share)}"],
        ["linear CKA of the items", f"{upgrade.cka:.3f}"],
    ]
    yield _table(["measure", "value"], rows)
    keys = dict.fromkeys(key[2:4] for key in measured.curves if key[:2] == (new, old))
    curves = [
        [f"{kind}, {order}, {scale}", interval(curve.area), f"{curve.curve.largest_dip:.3f}"]
        for kind, order in keys
        for scale in (RAW, CALIBRATED)
        for curve in [measured.curves[new, old, kind, order, scale]]
    ]
    yield _table(["backfill curve", f"area under {measured.metric}", "largest dip"], curves)


def _provenance(card: Card) -> Iterable[tuple[str, Any]]:
    yield from card.data.items()
    yield from ((f"sha256 of {path}", sha) for path, sha in card.files.items())


def _text_of(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_text_of(item)}" for key, item in value.items()) or "none"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(str, value)) if len(value) <= 20 else f"{len(value)}: {value[0]} to {value[-1]}"
    return "none" if value in (None, "") else str(value)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>"


def _image(svg: bytes, text: str) -> str:
    """An <img> rather than inline SVG, so that ids of one picture cannot clash with those of another."""
    data = base64.b64encode(svg).decode()
    return f'<figure><img alt="{escape(text)}" src="data:image/svg+xml;base64,{data}"></figure>'
