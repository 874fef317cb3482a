"""Fit an edge on pairs of embeddings, drawn or sent: fit on four fifths, measure on the rest; start at `fit`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from index.edges.transform import load_transform
from index.encoders.decoding import Decoder
from index.errors import InvalidArgument, RegraftError, pointer_to, shortened
from index.evaluation.adapter_choice import (
    AUTO,
    ChosenKind,
    Search,
    choose_kind,
    learning_curve,
    recommendation,
    serving_map,
)
from index.evaluation.adapters import Affine, SlerpAdapter, few_pairs_warning
from index.evaluation.domain import as_json, fit_domain
from index.evaluation.fitting import (
    FITS,
    MAX_COMPARED_PAIRS,
    PairArrays,
    Pairs,
    check_labels,
    check_pair_arrays,
    check_shared,
    fit_adapter,
    fit_calibration_maps,
    legal_options,
    measure,
    split_pairs,
)
from index.evaluation.metrics import Retrieval
from index.evaluation.relevance import label_codes
from index.evaluation.scores import scores
from index.incoming import incoming_folder
from index.version import EDGE, Card, Edge, EdgeKind
from service.registry.edge_records import EdgeOrigin, EdgeRecord
from service.registry.loaded_version import LoadedVersion
from service.registry.paired_embeddings import PairedEmbeddings, draw_pairs
from service.registry.registry import Registry
from service.replica.replica import Replica
from service.schemas import Body, FieldPath, Name, Seed
from service.store.audit import ChangeContext
from service.store.database.connections import Database
from service.store.galleries.gallery import gallery_named
from service.store.image_store.blobs import Blobs
from service.upgrades.edges.changes import accept, both_versions, check_no_edge
from service.upgrades.edges.sampling import make_pairs

MIN_PAIRS = 20
"""Fewer pairs are refused; fewer than `index.evaluation.adapters.FEW_PAIRS` cause a warning."""

MAX_EMBEDDED = 10_000
"""Items that a fit may embed; limited because a fit runs within its request."""

MAX_PAIRS = 100_000
"""Pairs that may be drawn from stored items, or sent."""


Contents = tuple[Blobs, Decoder]
"""The store of images and texts, and the decoder of images."""

SERVED = {kind: EdgeKind.SLERP if kind == "slerp" else EdgeKind.MATRIX for kind in FITS}


class TooFewPairs(RegraftError):
    """Too few items have embeddings by both versions."""

    status = 422
    code = "too_few_pairs"


class FitIn(Body):
    """An edge to fit on items of `gallery`, or of all galleries; `label`: a metadata field for measuring it."""

    new: Name
    old: Name
    kind: Literal["auto", "procrustes", "ridge", "low_rank", "slerp"]
    gallery: Name | None = None
    options: dict[str, float] = Field(default_factory=dict)
    # A fifth is held out: of 5,000 this leaves 4,000, which Drift-Adapter found enough.
    sample: Annotated[int, Field(ge=MIN_PAIRS, le=MAX_PAIRS)] = 5_000
    # If fewer items hold both embeddings, up to so many more are embedded for the fit, without being stored.
    embed: Annotated[int, Field(ge=0, le=MAX_EMBEDDED)] = 0
    label: FieldPath | None = None
    seed: Seed = 0
    replace: bool = False


def fit(
    database: Database,
    registry: Registry,
    replica: Replica,
    contents: Contents,
    request: FitIn,
    context: ChangeContext,
    sent: PairArrays | None = None,
) -> EdgeRecord:
    """Fit an edge, measure it as it will be served, and accept it unless it is a dry run.

    A fifth of the pairs is held out to measure the edge: neither the fit nor the choice of a kind uses it.
    `sent`: the pairs; None: pairs of stored items, of which up to `embed` are computed here.

    Raises:
        UnknownVersion, UnknownGallery: there is no such version or gallery.
        EdgeExists: there is an edge of this kind, and `replace` is false.
        TooFewPairs: says how many there are, and how to get more.
        InvalidArgument, InvalidVector: an option, the kind or the sent pairs cannot be used.
    """
    registry.sync()
    new, old = both_versions(registry, request.new, request.old)
    for served in {SERVED[kind] for kind in (FITS if request.kind == AUTO else [request.kind])}:
        check_no_edge(registry, (new.name, old.name, served.value), request.replace)
    options = _options(request)
    if sent is None:
        given = _drawn(database, contents, new, old, request)
        shared = f"items share a value of metadata field {request.label!r}", "/label"
    else:
        given = _sent(sent, new, old, request)
        shared = "pairs share a label", "/pairs/labels"
    pairs = split_pairs(*given.arrays, request.seed)
    check_shared(pairs, *shared)
    fitter = _Fitter(new.card, old.card, options)
    choice = choose_kind(FITS, fitter.search, pairs, old.card, request.seed) if request.kind == AUTO else None
    kind = choice.kind if choice else request.kind
    adapter = fitter.adapter(kind, pairs)
    with incoming_folder(registry.edges_folder) as folder:
        adapter.save(folder)
        domain = fit_domain(pairs, new.space)
        domain.save(folder)
        edge, measured = _measured(SERVED[kind], new.card, old.card, pairs, folder)
        write(edge, folder)
        evidence = {
            "fit": kind,
            "options": options,
            "source": "items" if sent is None else "file",
            "gallery": request.gallery,
            "label": request.label,
            "seed": request.seed,
            "held": given.held,
            "embedded": given.embedded,
            "fitted": edge.support,
            "queries": int(measured.valid.sum()),
            "domain": as_json(domain),
            **_evidence(fitter, kind, choice, pairs, measured),
            "warning": few_pairs_warning(edge.support),
        }
        fitted = EdgeRecord(edge, EdgeOrigin.FITTED, evidence)
        return accept(database, registry, replica, fitted, (new, old), context, replacing=request.replace)


def _measured(kind: EdgeKind, new: Card, old: Card, pairs: Pairs, folder: Path) -> tuple[Edge, Retrieval]:
    """The edge whose map is in `folder`, with its scores and score maps, and the results that these are of."""
    unmeasured = Edge(new.name, old.name, kind, old_encoder=old.encoder, folder=folder)
    queries = load_transform(unmeasured, new, old)(pairs.new_QM, pairs.old_QN)
    measured = measure(queries, pairs, old)
    calibration = fit_calibration_maps(kind, queries, pairs, new, old) if pairs.labelled else None
    support = len(pairs.new_SM)
    return replace(unmeasured, support=support, scores=scores(measured), calibration=calibration), measured


def write(edge: Edge, folder: Path) -> None:
    """Write edge.json beside the edge's other files, so that the folder is a complete edge folder."""
    (folder / EDGE).write_text(json.dumps(edge.as_json(), indent=2) + "\n")


@dataclass(frozen=True)
class _Fitter:
    """Fits any kind of adapter between two versions, with the request's options."""

    new: Card
    old: Card
    options: Mapping[str, int | float]

    def adapter(self, kind: str, pairs: Pairs) -> Affine | SlerpAdapter:
        """Raises InvalidArgument if an option or the kind cannot be used."""
        try:
            return fit_adapter(kind, pairs, self.new, self.old, self.options)
        except InvalidArgument as error:
            prefix = "/options" if error.pointer.lstrip("/") in legal_options(FITS[kind]) else ""
            raise InvalidArgument(error.message, pointer=prefix + error.pointer) from error

    def search(self, kind: str, pairs: Pairs) -> Search:
        """The adapter as a map of queries. Raises as `adapter`."""
        return serving_map(self.adapter(kind, pairs), self.old)


def _evidence(
    fitter: _Fitter, kind: str, choice: ChosenKind | None, pairs: Pairs, measured: Retrieval
) -> dict[str, Any]:
    """The evidence besides the edge's own scores: baselines, the learning curve, and advice in words."""
    old_old = measure(pairs.old_QN, pairs, fitter.old) if pairs.labelled else None
    curve = learning_curve(kind, fitter.search, pairs, fitter.old, measured)
    chosen = [choice.in_words()] if choice else []
    return {
        "old_old": {name: vars(score) for name, score in scores(old_old).items()} if old_old else None,
        **(choice.as_json() if choice else {}),
        "curve": curve.as_json(),
        "advice": [*chosen, curve.in_words(), recommendation(kind, measured, old_old)],
    }


class _Given(NamedTuple):
    """The pairs, how many pairs or stored items hold both embeddings, and how many pairs were embedded here."""

    arrays: PairArrays
    held: int
    embedded: int


def _sent(sent: PairArrays, new: LoadedVersion, old: LoadedVersion, request: FitIn) -> _Given:
    """The pairs of the request, checked."""
    if len(sent.new) > MAX_PAIRS:
        raise InvalidArgument(f"{len(sent.new)} pairs; at most {MAX_PAIRS} are legal", pointer="/pairs")
    checked = check_pair_arrays(sent, new.card, old.card, MIN_PAIRS)
    if request.kind == "slerp" and len(checked.new) > MAX_COMPARED_PAIRS:
        raise InvalidArgument(f"kind slerp accepts at most {MAX_COMPARED_PAIRS} pairs", pointer="/pairs")
    return _Given(checked, len(sent.new), 0)


def _drawn(database: Database, contents: Contents, new: LoadedVersion, old: LoadedVersion, request: FitIn) -> _Given:
    """Pairs of stored items; missing ones are embedded, if the request asks for that."""
    if request.kind == "slerp" and request.sample > MAX_COMPARED_PAIRS:
        raise InvalidArgument(f"kind slerp accepts a sample of at most {MAX_COMPARED_PAIRS}", pointer="/sample")
    with database.read() as connection:
        gallery_id = None if request.gallery is None else gallery_named(connection, request.gallery).id
        drawn, available = draw_pairs(
            connection, new, old, gallery_id=gallery_id, label=request.label, sample=request.sample, seed=request.seed
        )
    missing_count = min(request.embed, request.sample - len(drawn.names))
    embedded = None
    if missing_count > 0:
        blobs, decoder = contents
        embedded = make_pairs(
            database,
            blobs,
            decoder,
            (new, old),
            gallery_id=gallery_id,
            label=request.label,
            count=missing_count,
            seed=request.seed,
        )
    pairs = drawn if embedded is None else drawn.with_more(embedded)
    _check_enough(pairs, available, new, old, request)
    if pairs.labels is not None:
        what = f"the {len(pairs.labels)} items with metadata field {request.label!r}"
        check_labels(pairs.labels, what, "/label")
    labels = None if pairs.labels is None else label_codes(pairs.labels)
    arrays = PairArrays(pairs.new, pairs.old, labels)
    return _Given(arrays, available, 0 if embedded is None else len(embedded.names))


def _check_enough(
    drawn: PairedEmbeddings, available: int, new: LoadedVersion, old: LoadedVersion, request: FitIn
) -> None:
    if len(drawn.names) < MIN_PAIRS:
        source = "stored items" if request.gallery is None else f"items of gallery {request.gallery!r}"
        labelled = (
            "" if request.label is None else f", {len(drawn.names)} of them with metadata field {request.label!r}"
        )
        raise TooFewPairs(
            f"{available} {source} have embeddings by both {new.name!r} and {old.name!r}{labelled}; a fit requires "
            f"{MIN_PAIRS}. {_how_to_get_more(new, old)}",
            pointer="/label" if available >= MIN_PAIRS else "/gallery",
        )


def _how_to_get_more(new: LoadedVersion, old: LoadedVersion) -> str:
    sending = f"Send embeddings by {new.name!r} of items that have one by {old.name!r}, or vice versa"
    encoders = " or ".join(repr(version.name) for version in (new, old) if version.card.encoder or version.card.text)
    if not encoders:
        return sending
    embedding = "embed=N (--embed N) embeds N of them for the fit, and a reencode backfill"
    return f"{sending}. If items are images or texts, {embedding} to {encoders} embeds all once it is current"


def _options(request: FitIn) -> Mapping[str, int | float]:
    """The options, each of the type of its default."""
    legal: dict[str, Any] = legal_options(FITS.get(request.kind))
    options: dict[str, int | float] = {}
    for name, value in request.options.items():
        default = legal.get(name)
        if default is None:
            known = ", ".join(f"{key}={value}" for key, value in legal.items()) or "none"
            why = f"kind {request.kind} has no option {shortened(name)!r}; legal: {known}"
            raise InvalidArgument(why, pointer=pointer_to("options", name))
        if isinstance(default, int) and value != int(value):
            raise InvalidArgument(f"option {name} must be a whole number, not {value:g}", pointer=f"/options/{name}")
        options[name] = type(default)(value)
    return options
