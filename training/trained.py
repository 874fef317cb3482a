"""A trained version in torch: what an export is made from, and what a later version is made compatible with.

A version folder made here also holds `weights.safetensors` (serving ignores it): the backbone, what its method ships
beside it, and a classifier head, as plain arrays. The recipe in the card says how to build the modules around them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Self

import safetensors.torch
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from index.errors import InvalidArgument, InvalidVersionFolder
from index.version import CARD, EdgeKind, Version
from index.version_folder.folder import load_given_version
from training.data.images import ClassName
from training.method import Classifier, Method, MethodContext, OldSummary
from training.methods import METHODS, method_options
from training.networks.backbones import build_backbone
from training.networks.heads import HEADS
from training.networks.side_information import Psi, build_psi, check_side, dim_of
from training.recipes import Recipe, recipe_from_json

WEIGHTS = "weights.safetensors"
OUTPUTS: dict[str, Callable[[Tensor], Tensor]] = {"cosine": F.normalize, "l2": nn.Identity(), "lorentz": nn.Identity()}
"""space -> raw embeddings to embeddings ready to compare."""


class Trained(nn.Module):
    """Images -> embeddings ready to compare, and the parts they are made by.

    Args:
        recipe: how it was made.
        backbone: images -> (B, D).
        method: whose `transform` and `edge` ship; its losses are not used again.
        classes: what it was trained on, by name.
        old_dim: dimension of the version it is compatible with, 0 without one.
        head: weight (C, dim) and bias of a linear head on the raw embedding, where there is one.
        psi: images -> (B, side_dim) side-information, where the recipe has it.
        old_side_dim: of the version it is compatible with.
    """

    def __init__(
        self,
        recipe: Recipe,
        backbone: nn.Module,
        method: Method,
        classes: list[ClassName],
        old_dim: int = 0,
        head: tuple[Tensor, Tensor | None] | None = None,
        psi: Psi | None = None,
        old_side_dim: int = 0,
    ) -> None:
        super().__init__()
        self.recipe, self.classes = recipe, classes
        self.old_dim, self.old_side_dim = old_dim, old_side_dim
        self.head = head
        self.psi = psi
        self.raw = nn.Sequential(backbone, method.transform)
        """Images (B, C, H, W) -> raw embeddings (B, dim), what methods work on (z)."""
        self.edge: nn.Module | None = method.edge
        self.edge_kind: EdgeKind | None = method.edge_kind
        self.version: Version | None = None
        """The folder that it was loaded from."""
        self.eval().requires_grad_(False)

    @property
    def backbone(self) -> nn.Module:
        """Images -> (B, D), below what the method ships."""
        return self.raw[0]

    @property
    def dim(self) -> int:
        """Dimension of the stored embedding."""
        spec = self.recipe.preprocess
        probe = torch.zeros(1, spec.channels, spec.height, spec.width, device=next(self.parameters()).device)
        return int(self.raw(probe).shape[1])

    @property
    def space(self) -> str:
        """How its embeddings compare."""
        return self.recipe.space

    @property
    def side_dim(self) -> int:
        """How many numbers of side-information are stored beside each embedding."""
        return dim_of(self.recipe)

    def forward(self, image_BCHW: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, dim), ready to compare."""
        return OUTPUTS[self.recipe.space](self.raw(image_BCHW))

    def save(self, folder: Path) -> None:
        """Write `weights.safetensors`."""
        arrays = {k: v.contiguous() for k, v in self.state_dict().items()}
        if self.head is not None:
            weight, bias = self.head
            arrays |= {"head.weight": weight.contiguous()} | ({} if bias is None else {"head.bias": bias.contiguous()})
        # One entry: safetensors writes several in an order that differs from run to run.
        old = {"old_dim": self.old_dim} | ({"old_side_dim": self.old_side_dim} if self.old_side_dim else {})
        notes = {"notes": json.dumps({"classes": self.classes, **old})}
        (folder / WEIGHTS).write_bytes(safetensors.torch.save(arrays, notes))

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read a version folder made by this package; every file is verified against its card first.

        Raises:
            InvalidVersionFolder: the folder does not match its card, or holds no weights to train against.
        """
        version = load_given_version(folder)
        if WEIGHTS not in version.card.files:
            raise InvalidVersionFolder(
                f"{folder} has no {WEIGHTS}, so only its embeddings can be trained against: set old_embeddings=FILE"
            )
        recipe = recipe_from_json(version.card.recipe)
        arrays, classes, old_dim, old_side_dim = _read_weights(folder)
        weight, bias = arrays.pop("head.weight", None), arrays.pop("head.bias", None)
        blank = blank_old(len(classes), old_dim, old_side_dim, recipe.space) if old_dim else None
        method = build_method(recipe, len(classes), blank)
        channels = recipe.preprocess.channels
        backbone = build_backbone(recipe.backbone, channels, recipe.dim, last_relu=recipe.last_relu)
        head = None if weight is None else (weight, bias)
        trained = cls(recipe, backbone, method, classes, old_dim, head, build_psi(recipe), old_side_dim)
        try:
            trained.load_state_dict(arrays)
        except RuntimeError as error:
            raise InvalidVersionFolder(
                f"{folder}: {WEIGHTS} does not fit the recipe in {CARD}: {error}", pointer=f"/{WEIGHTS}"
            ) from error
        trained.version = version
        return trained


def build_method(
    recipe: Recipe,
    classes: int,
    old: OldSummary | None,
    independent_dim: int | None = None,
    independent_head: tuple[Tensor, Tensor | None] | None = None,
) -> Method:
    """The recipe's method for this many classes; what is said of the independent version as in `MethodContext`.

    Raises:
        InvalidArgument: an unknown method, head, option or value; lists the legal ones.
    """
    check_side(recipe)
    options = method_options(recipe.method)
    _require_known("head", recipe.head, HEADS)
    _require_known("space", recipe.space, OUTPUTS)
    for option in recipe.options:
        _require_known("options", option, options)

    def classifier(dim: int) -> Classifier:
        return Classifier(HEADS[recipe.head](dim, classes), recipe.label_smoothing)

    context = MethodContext(
        recipe.dim,
        classes,
        classifier,
        old,
        recipe.space,
        dim_of(recipe),
        recipe.side_bits,
        independent_dim,
        independent_head,
    )
    return METHODS[recipe.method](context, **recipe.options)


def _read_weights(folder: Path) -> tuple[dict[str, Tensor], list[ClassName], int, int]:
    """Arrays by name, the classes trained on, the old version's dimension and that of its side-information."""
    try:
        with safe_open(folder / WEIGHTS, "pt") as held:
            notes = json.loads(held.metadata()["notes"])
            arrays = {name: held.get_tensor(name) for name in held.keys()}  # noqa: SIM118
        return arrays, notes["classes"], notes["old_dim"], notes.get("old_side_dim", 0)
    except (SafetensorError, TypeError, KeyError, ValueError) as error:
        raise InvalidVersionFolder(
            f"{folder}: {WEIGHTS} was not written by this release: {error}", pointer=f"/{WEIGHTS}"
        ) from error


def _require_known(field: str, value: str, legal: Iterable[str]) -> None:
    if value not in legal:
        raise InvalidArgument(f"{field} {value!r} is unknown; legal: {', '.join(legal)}", pointer=f"/{field}")


def blank_old(classes: int, dim: int, side_dim: int, space: str) -> OldSummary:
    """An old version of the right size: a method built with it has the right parts to load weights into."""
    rows = torch.zeros(classes, dtype=torch.long)
    means = torch.zeros(classes, dim)
    head = torch.zeros(1, dim), torch.zeros(1)
    return OldSummary(means, rows, *head, space, centre_CN=means, radius_C=torch.zeros(classes), side_dim=side_dim)
