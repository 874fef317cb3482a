"""The cost of a training step of each method, relative to an independent step plus one forward of the old model.

    python benchmarks/training_step.py --backbone resnet18_32 --side 32 --batch-size 64 --rounds 5

All methods take turns in one run, forward, backward and optimiser, on random images of SIDE pixels. The figure is the
best of ROUNDS, because other programs can only add to it. The last column is relative to an independent step and one
forward of the old model: what exceeds 1 is the method's own arithmetic, and for BT2 the forward of the independent
model. "cached" is with `cache_old`, without any forward of a frozen model.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import lightning
import torch
import torch.nn.functional as F
from command_line import Count, run_main
from torch import Tensor

from training.method import EmbeddedBatch, OldSummary
from training.methods import METHODS
from training.networks.backbones import Frozen, build_backbone
from training.recipes import Recipe
from training.trained import build_method

CLASSES, OLD_CLASSES, DIM, OLD_DIM = 100, 50, 128, 128
DIMS = {"oca": DIM + 32, "bt2": DIM + OLD_DIM}
"""Methods whose backbone must be wider."""
LOOKS_TWICE = {"bt2"}
"""Methods that look at the independent model beside their own backbone."""


def main(backbone: str = "resnet18_32", side: Count = 32, batch_size: Count = 64, rounds: Count = 5) -> None:
    lightning.seed_everything(0, verbose=False)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    image_BCHW = torch.randn(batch_size, 3, side, side, device=device)
    label_B = torch.randint(CLASSES, (batch_size,), device=device)
    old = Frozen(build_backbone(backbone, 3, OLD_DIM)).to(device)
    steps = {name: step_of(name, backbone, old, image_BCHW, label_B) for name in METHODS}
    steps["one old forward"] = lambda: old(image_BCHW)
    steps["fct, cached"] = step_of("fct", backbone, old, image_BCHW, label_B, cached=True)
    steps["bt2, cached"] = step_of("bt2", backbone, old, image_BCHW, label_B, cached=True)
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(rounds + 1):  # the first round warms up and rarely is the best
        for name, step in steps.items():
            best[name] = min(best[name], seconds(step))
    bound = best["independent"] + best["one old forward"]
    print(f"{backbone}, {side} pixels, batch {batch_size}, {device}, best of {rounds}\n")
    print("| step | ms | of independent + one old forward |\n| --- | --- | --- |")
    for name, spent in best.items():
        print(f"| {name} | {1000 * spent:.1f} | {spent / bound:.2f} |")


def step_of(
    name: str, backbone: str, old: Frozen, image_BCHW: Tensor, label_B: Tensor, *, cached: bool = False
) -> Callable[[], object]:
    """One whole step of a method, as `training.module` makes it."""
    device, hyperbolic = image_BCHW.device, name == "hbct"
    dim, space = DIMS.get(name, DIM), "lorentz" if hyperbolic else "cosine"
    head = "lorentz_mlr" if hyperbolic else "softmax"
    recipe = Recipe(name, method=name, backbone=backbone, dim=dim, head=head, space=space)
    method = build_method(recipe, CLASSES, None if name == "independent" else known(space)).to(device)  # type: ignore[attr-defined]
    encoder = build_backbone(backbone, 3, dim).to(device)
    encoder = encoder if method.trains_encoder else Frozen(encoder)  # type: ignore[assignment]
    independent = Frozen(build_backbone(backbone, 3, DIM)).to(device) if name in LOOKS_TWICE else None
    learning = [p for p in (*encoder.parameters(), *method.parameters()) if p.requires_grad]
    optimiser = torch.optim.SGD(learning, 1e-3, momentum=0.9)
    kept_BN = 0.1 * torch.randn(len(label_B), DIM, device=device)

    def look(model: Frozen | None) -> Tensor | None:
        if model is None:
            return None
        return kept_BN if cached else 0.1 * F.normalize(model(image_BCHW))  # small, so that it is a hyperbolic point

    def step() -> None:
        seen = None if name == "independent" else look(old)
        loss = method(EmbeddedBatch(encoder(image_BCHW), label_B, seen, look(independent), 0.25)).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()

    return step


def known(space: str) -> OldSummary:
    """An old version that knows the first half of the classes."""
    mean_CN = 0.1 * torch.randn(CLASSES, OLD_DIM)
    label_C = torch.arange(CLASSES).where(torch.arange(CLASSES) < OLD_CLASSES, -1)
    weight_KN, bias_K = torch.randn(OLD_CLASSES, OLD_DIM), torch.zeros(OLD_CLASSES)
    return OldSummary(mean_CN, label_C, weight_KN, bias_K, space, F.normalize(mean_CN), torch.ones(CLASSES))


def seconds(step: Callable[[], object]) -> float:
    begun = time.perf_counter()
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begun


if __name__ == "__main__":
    run_main(main)
