"""Training methods: a module for each paper, all listed in `METHODS`."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from index.errors import InvalidArgument
from training.method import Method
from training.methods.advbct import AdvBct
from training.methods.bct import Bct
from training.methods.bt2 import Bt2
from training.methods.contrast import Contrast
from training.methods.fct import Fct
from training.methods.hbct import Hbct
from training.methods.hoc import Hoc
from training.methods.hot_refresh import HotRefresh
from training.methods.independent import Independent
from training.methods.l2 import L2
from training.methods.lwf import Lwf
from training.methods.oca import Oca
from training.recipes import Option

METHODS: dict[str, Callable[..., Method]] = {
    "independent": Independent,
    "l2": L2,
    "lwf": Lwf,
    "bct": Bct,
    "oca": Oca,
    "fct": Fct,
    "contrast": Contrast,
    "hot_refresh": HotRefresh,
    "advbct": AdvBct,
    "hoc": Hoc,
    "bt2": Bt2,
    "hbct": Hbct,
}
"""name -> (context, **options) -> method."""


def method_options(method: str) -> dict[str, Option]:
    """Names and defaults of a method's options.

    Raises:
        InvalidArgument: an unknown method; lists the legal ones.
    """
    if method not in METHODS:
        raise InvalidArgument(f"method {method!r} is unknown; legal: {', '.join(METHODS)}", pointer="/method")
    parameters = inspect.signature(METHODS[method]).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
