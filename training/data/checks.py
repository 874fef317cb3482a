"""Checks of images and labels for what would make the results of a measurement wrong without any error.

`check_measurable` refuses data on which nothing can be measured; the warnings are about data that may be meant so.
"""

from __future__ import annotations

import logging
import unicodedata
from collections import Counter
from collections.abc import Iterable
from functools import cache

import numpy as np

from index.errors import InvalidArgument
from training.data.images import Data

_log = logging.getLogger(__name__)


def check_measurable(data: Data) -> None:
    """Refuse data of which every query, or fewer than two, can find its class.

    Raises:
        InvalidArgument: says what is missing.
    """
    if (findable := len(data.query) - data.queries_without_match()) < 2:
        having = "only one query image has" if findable else "no query image has"
        raise InvalidArgument(
            f"nothing can be measured: {having} another image of its class to find, and two are required; "
            "each class needs two images in test/, or one in query/ and one in gallery/, or four where a fifth is kept",
            pointer="/root",
        )
    if len(np.unique(data.gallery.labels)) < 2:
        raise InvalidArgument(
            f"nothing can be measured: all {len(data.gallery)} images to find are of one class, "
            f"{data.name(int(data.gallery.labels[0]))!r}, so that every answer is right",
            pointer="/root",
        )


def warn_of_similar_names(names: Iterable[str]) -> None:
    """Log a warning if names of classes differ only in case, spaces at their ends, or how Unicode composes letters."""
    known: dict[str, str] = {}
    for name in names:
        form = unicodedata.normalize("NFKC", name).strip().casefold()
        if form in known:
            _log.warning("%r and %r are two classes, although their names look alike", known[form], name)
            return
        known[form] = name


def warn_of_repeats(data: Data, *, trained_on: bool = True, log: bool = True) -> None:
    """Log a warning if test images are in the training images too, or if queries find copies of themselves.

    The same one only once in a process, which may train several versions on the same images.

    Args:
        data: its images are all read once, also for their fingerprints.
        trained_on: its training images are of concern.
        log: False only reads them.
    """
    query, gallery = data.query.digests, data.gallery.digests
    if trained_on:
        trained, tested = set(data.train.digests), query if data.same else query + gallery
        _warn(log, sum(digest in trained for digest in tested), len(tested), "test images are trained on, too")
    copies = Counter(gallery)
    others = sum(copies[digest] > (1 if data.same else 0) for digest in query)
    _warn(log, others, len(query), "query images find a copy of themselves")


def _warn(log: bool, count: int, total: int, what: str) -> None:
    if log and count:
        warn_once(f"{count} of {total} {what}: results look better than they are")


@cache
def warn_once(text: str) -> None:
    """Log a warning, unless this process has logged it already."""
    _log.warning(text)
