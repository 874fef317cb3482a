"""`contrast`, the baseline of BT2 (Zhou 2023, arXiv 2211.03989): Hot-Refresh's loss with BT2's settings.

Temperature 1 and weight 10 are those of BT2's public code, which leaves the new embedding unnormalised; here both sides
are unit vectors, as they are when compared.
"""

from __future__ import annotations

from training.method import MethodContext
from training.methods.hot_refresh import HotRefresh


class Contrast(HotRefresh):
    """Base loss + weight * regression-alleviating contrast.

    Args:
        context: see `MethodContext`.
        weight: of the contrast.
        temperature: of the cosines.
    """

    def __init__(self, context: MethodContext, *, weight: float = 10.0, temperature: float = 1.0) -> None:
        super().__init__(context, weight=weight, temperature=temperature)
