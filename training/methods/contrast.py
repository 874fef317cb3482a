"""`contrast`, the baseline of BT2 (Zhou 2023, arXiv 2211.03989): Hot-Refresh's loss with BT2's weight.

BT2's public code has temperature 1, on new embeddings that it leaves unnormalised. Here both sides are unit vectors, as
they are when compared, and a temperature of 1 leaves the contrast flat: e^cos lies between 0.4 and 2.7. On digits
(three training seeds, old/old 82.1 % CMC-1) new/old is 85.8 at 1, 90.1 at 0.1 and 90.0 at 0.05.
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

    def __init__(self, context: MethodContext, *, weight: float = 10.0, temperature: float = 0.1) -> None:
        super().__init__(context, weight=weight, temperature=temperature)
