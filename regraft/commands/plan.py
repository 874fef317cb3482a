"""`regraft plan`: an estimate of moving a gallery to a new version, up to billions of items."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from index.errors import InvalidArgument, InvalidVersionFolder
from index.version_folder.folder import load_given_version
from regraft.models import BackfillEstimate
from regraft.terminal.answers import answer, out
from regraft.terminal.extras import needs
from regraft.terminal.printing import print_table

if TYPE_CHECKING:
    from index.evaluation.cost import BackfillCost, ItemCost
    from index.version import Version

MEASURE_SECONDS = 1.0
BATCH = 32


def _rate(given: float | None) -> float | None:
    if given is not None and not 0 < given < math.inf:
        raise typer.BadParameter("must be a number above 0")
    return given


def plan(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="Folder of the version that the items have now.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="Folder of the version to move to.")],
    items: Annotated[int, typer.Option(min=1, help="Number of stored items.")] = 1_000_000,
    workers: Annotated[int, typer.Option(min=1, help="Number of workers.")] = 1,
    reencode_rate: Annotated[
        float | None,
        typer.Option(help="Images or texts per second and worker.", show_default=False, callback=_rate),
    ] = None,
    transform_rate: Annotated[
        float | None,
        typer.Option(help="Transforms per second and worker; default: measured.", show_default=False, callback=_rate),
    ] = None,
    image_bytes: Annotated[int, typer.Option(min=0, help="Mean size of a stored image in bytes.")] = 100_000,
    item_tokens: Annotated[int, typer.Option(min=1, help="Mean tokens of a stored text, for an embedding API.")] = 100,
) -> None:
    """Compare the cost of re-encoding and transforming items.

    Example: regraft plan runs/v1 runs/v2 --items 1000000000 --workers 8
    """
    before, after = load_given_version(old), load_given_version(new)
    if before.name == after.name:
        raise InvalidArgument(f"OLD and NEW are the same version {before.name!r}")
    rows, ways = [], []
    for way, cost in (
        ("reencode", _provider_cost(after, reencode_rate, items, item_tokens) or _reencode(after, reencode_rate)),
        ("transform", _transform(before, after, transform_rate)),
    ):
        if cost is not None:
            bill = _provider_bill(after, items, item_tokens) if way == "reencode" else {}
            read = items * image_bytes if way == "reencode" and not bill else 0
            estimate = _estimate(cost, before, items, workers)
            rows.append(_row(way, cost, estimate, read))
            ways.append({"way": way, **vars(estimate), "bytes_read": read, "macs_per_item": cost.macs, **bill})
    if not rows:
        raise InvalidArgument(f"{after.name!r} has neither an encoder nor a forward edge from {before.name!r}")
    answer({"old": before.name, "new": after.name, "workers": workers, "ways": ways})
    print_table(["way", "computing", "images read", "MACs per item", "total MACs", "stored now", "stored after"], rows)
    out.print(f"{items:,} items from {before.name} to {after.name}, {workers} worker(s); old vectors are kept")
    for one in ways:
        if "tokens" in one:
            out.print(f"reencode calls a provider: {_bill_text(one['tokens'], one['price'])}")


def print_estimate(shown: BackfillEstimate) -> None:
    """Print an estimate of the service."""
    answer(shown)
    macs = shown.macs_per_item
    others = f" ({shown.without_image:,} more that the version cannot embed)" if shown.without_image else ""
    ways = f"{_count(macs.reencode)} to reencode, {_count(macs.transform)} to transform"
    lines = {
        "items": f"{shown.items:,}{others}",
        "time": f"{_seconds(shown.seconds)} with one worker (measured on {shown.sampled} items)",
        "stored": f"{_bytes(shown.bytes_now)} now, {_bytes(shown.bytes_after)} after, {_retired(shown)}",
        "MACs per item": ways,
    }
    if shown.tokens is not None:
        lines["provider"] = f"{_bill_text(shown.tokens, shown.price)}; the sample was sent to it"
    out.print(f"{shown.kind} to {shown.version}: an estimate, nothing was started")
    print_table(["", ""], [[name, line] for name, line in lines.items()])


def _bill_text(tokens: float, price: float | None) -> str:
    ways = "no price in the version's card" if price is None else f"{price:,.2f} by the card's price"
    return f"about {tokens:,.0f} tokens, {ways}"


def _provider_bill(new: Version, items: int, tokens: int) -> dict[str, float | None]:
    """The tokens and price of a provider, if the version has one."""
    if new.card.api is None:
        return {}
    from index.evaluation.cost import provider_price

    return {"tokens": items * tokens, "price": provider_price(new.card.api, items, tokens)}


def _retired(shown: BackfillEstimate) -> str:
    after = shown.bytes_after_retiring
    if after is None:
        return "and the older versions still in use"
    return f"{_bytes(after)} once older versions are retired"


def _provider_cost(new: Version, rate: float | None, items: int, tokens: int) -> ItemCost | None:
    """The cost with a provider's API: the time that its limits require; sends no request."""
    if new.card.api is None:
        return None
    with needs("worker"):
        from index.evaluation.cost import ItemCost, provider_seconds
    least = provider_seconds(new.card.api, items, tokens) / items
    return ItemCost(None, max(least, 1 / rate if rate else 0.0) or None, new.card.dim)


def _reencode(new: Version, rate: float | None) -> ItemCost | None:
    if not new.card.encoder:
        return None
    with needs("worker"):
        from index.encoders.encoder import Encoder
        from index.evaluation.cost import ItemCost
        from index.evaluation.macs import encoder_macs
    macs, floats = _macs(lambda: encoder_macs(new)), new.card.dim + new.card.side_dim
    if rate is None:
        import numpy as np

        encoder = Encoder(new)
        pixels = np.zeros((BATCH, encoder.spec.channels, encoder.spec.height, encoder.spec.width), np.float32)
        return ItemCost(macs, _measure(lambda: encoder.encode_arrays(pixels)), floats)
    return ItemCost(macs, 1 / rate, floats)


def _macs(count: Callable[[], int]) -> int | None:
    """Multiply-accumulates per item; None if they are only known at run time."""
    try:
        return count()
    except InvalidVersionFolder:
        return None


def _transform(old: Version, new: Version, rate: float | None) -> ItemCost | None:
    from index.version import EdgeKind

    edge = next((e for e in new.edges if e.old == old.name and e.kind is EdgeKind.FORWARD), None)
    if edge is None:
        return None
    with needs("worker"):
        from index.edges.transform import load_forward
        from index.evaluation.cost import ItemCost
        from index.evaluation.macs import forward_macs
    macs, transform = _macs(lambda: forward_macs(edge, old.card)), load_forward(edge, new.card, old.card)
    floats = new.card.dim + (new.card.side_dim if transform.has_side else 0)
    if rate is None:
        import numpy as np

        vectors = np.full((BATCH, old.card.dim), old.card.dim**-0.5, np.float32)
        sides = np.zeros((BATCH, old.card.side_dim), np.float32)
        return ItemCost(macs, _measure(lambda: transform.transform_items(vectors, sides)), floats)
    return ItemCost(macs, 1 / rate, floats)


def _measure(run: Callable[[], object]) -> float:
    """Seconds per item, without the first batch."""
    run()
    started, batches = time.perf_counter(), 0
    while time.perf_counter() - started < MEASURE_SECONDS:
        run()
        batches += 1
    return (time.perf_counter() - started) / (batches * BATCH)


def _estimate(cost: ItemCost, old: Version, items: int, workers: int) -> BackfillCost:
    from index.evaluation.cost import estimate_backfill

    return estimate_backfill(items, cost, old_floats=old.card.dim + old.card.side_dim, workers=workers)


def _row(way: str, cost: ItemCost, estimate: BackfillCost, bytes_read: int) -> list[str]:
    return [
        way,
        _seconds(estimate.seconds),
        _bytes(bytes_read),
        _count(cost.macs),
        _count(estimate.macs),
        _bytes(estimate.bytes_before),
        _bytes(estimate.bytes_after),
    ]


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    for size, unit in ((86_400, "days"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.3g} s"


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 999.5:  # three digits; 1,016 KiB would be 1.02e+03
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:,.3g} TiB"


def _count(number: float | None) -> str:
    return "unknown" if number is None else f"{number:.3g}"
