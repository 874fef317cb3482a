"""Export: a trained version becomes a version folder that serving can read without torch.

`index.version_folder.new_folder` sees to it that no half-written version is ever left under its name.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from index.creation.probes import ParityError
from index.errors import InvalidArgument, InvalidVersionFolder
from index.evaluation.scores import scores
from index.version import EDGE_MODEL, ENCODER, PROBE, SIDE, Card, Edge, Version
from index.version_folder.folder import load_given_version, write_card, write_edge
from index.version_folder.new_folder import check_target, new_folder
from training.data.images import Data, ImageDataset
from training.measurement import Report
from training.method import ItemEdge
from training.tracing import to_onnx
from training.trained import WEIGHTS, Trained

PARITY = 1e-5
"""Largest difference between torch and onnxruntime on real images; a share of the largest number if that is above 1."""
PARITY_IMAGES = 64
UNEXPORTED_EDGES = "unfinished"
"""Folder of an edge whose model is not exported yet: an edge without its model must not be below `edges`."""


def write_version(trained: Trained, report: Report, data: Data, old: Version | None, out: Path) -> Card:
    """Write what was trained and measured as a version folder.

    Args:
        trained: the version.
        report: its measurements, for the card and the edge.
        data: what it was trained on; its gallery gives the images of the parity check.
        old: the version its edge leads to.
        out: the folder to write; replaced when it exists and is a version folder.

    Raises:
        InvalidArgument: `out` cannot be a version's folder.
        ParityError: onnxruntime and torch disagree.
        Unwritable: the disk is full, or the like.
    """
    check_target(out, old)
    image_BCHW = _real_images(trained, data)
    with new_folder(out) as folder:
        trained.save(folder)
        write_probe(trained, image_BCHW[:1], folder)
        if can_export():
            write_models(trained, image_BCHW, folder, None if old is None else old.name)
        if old is not None and trained.edge_kind is not None:
            measured = {} if report.new_old is None else scores(report.new_old)
            edge = Edge(out.name, old.name, trained.edge_kind, measured, old.card.encoder, report.calibration)
            write_edge(folder, edge)
            if trained.edge is not None and not can_export():
                (folder / "edges").rename(folder / UNEXPORTED_EDGES)
        return write_card(folder, _card(trained, report, data, out.name, exported=can_export()))


def export(checkpoint: Path, out: Path) -> Path:
    """Write the ONNX models of a version that was trained where no exporter was installed, checked on its probe image.

    Args:
        checkpoint: a version folder with `weights.safetensors`, with or without its ONNX models.
        out: the version folder to write; may be `checkpoint` itself.

    Returns:
        `out`.

    Raises:
        InvalidArgument: the exporter is not installed, or `out` cannot be a version's folder.
        InvalidVersionFolder: `checkpoint` does not match its card, or holds no weights.
        ParityError: onnxruntime and torch disagree.
        Unwritable: the disk is full, or the like.
    """
    if not can_export():
        raise InvalidArgument("the export requires the packages onnx and onnxscript")
    check_target(out)
    if WEIGHTS not in load_given_version(checkpoint).card.files:
        raise InvalidVersionFolder(
            f"{checkpoint} has no {WEIGHTS}, so it was not trained here: nothing can be exported"
        )
    trained = Trained.load(checkpoint)
    assert trained.version is not None
    with new_folder(out) as folder:
        shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
        _move_unfinished(folder)
        with np.load(folder / PROBE, allow_pickle=False) as probe:
            image_1CHW = torch.from_numpy(probe["image"])
        write_models(trained, image_1CHW, folder, _learned_edge(trained, folder))
        write_card(folder, replace(trained.version.card, name=out.name, preprocess=trained.recipe.preprocess))
    return out


def write_probe(trained: Trained, image_1CHW: Tensor, folder: Path) -> None:
    """Write probe.npz: one real image and the version's outputs for it."""
    modules = {"embedding": trained} | ({} if trained.psi is None else {"side": trained.psi})
    arrays = {name: _torch_outputs(module, image_1CHW).numpy() for name, module in modules.items()}
    np.savez(folder / PROBE, image=image_1CHW.numpy(), **arrays)


def write_models(trained: Trained, image_BCHW: Tensor, folder: Path, old: str | None) -> None:
    """Write encoder.onnx, and side.onnx and the edge's onnx model where there is one, each checked against torch.

    Args:
        trained: the version.
        image_BCHW: real images.
        folder: where to write.
        old: name of the version that its edge leads to.
    """
    write_model(folder / ENCODER, trained, {"images": image_BCHW}, ["embedding"])
    if trained.psi is not None:
        write_model(folder / SIDE, trained.psi, {"images": image_BCHW}, ["side"])
    if trained.edge is not None and trained.edge_kind is not None and old is not None:
        place = folder / "edges" / old / EDGE_MODEL[trained.edge_kind]
        place.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(trained.edge, ItemEdge):
            inputs = _random_items(trained.edge, trained.old_dim, trained.old_side_dim)
            write_model(place, Outputs(trained.edge), inputs, list(trained.edge.transform_items(*inputs.values())))
        else:
            write_model(place, trained.edge, {"embedding": _random_units(trained.dim)}, ["moved"])


def write_model(path: Path, module: nn.Module, inputs: Mapping[str, Tensor], outputs: list[str]) -> None:
    """Write a module as an ONNX model and check it against torch.

    Args:
        path: the file.
        module: gives one tensor, or a tuple of as many as `outputs`.
        inputs: its inputs by name.
        outputs: names of its outputs.

    Raises:
        ParityError: onnxruntime and torch disagree.
    """
    path.write_bytes(to_onnx(module, inputs, outputs, packed=isinstance(module, Outputs)))
    check_parity(path, inputs, _torch_outputs(module, *inputs.values()))


class Outputs(nn.Module):
    """An item edge whose forward gives all outputs, as a tuple."""

    def __init__(self, edge: ItemEdge) -> None:
        super().__init__()
        self.edge = edge

    def forward(self, *stored: Tensor) -> tuple[Tensor, ...]:
        """See `ItemEdge.transform_items`."""
        return tuple(self.edge.transform_items(*stored).values())


def check_parity(path: Path, inputs: Mapping[str, Tensor], expected: Tensor | tuple[Tensor, ...]) -> None:
    """Compare the outputs of an ONNX model with those of torch; prints a notice where onnxruntime is not installed.

    Raises:
        ParityError: the largest difference exceeds `PARITY`.
    """
    if importlib.util.find_spec("onnxruntime") is None:
        print(f"onnxruntime is not installed: {path.name} was not compared with torch")
        return
    import onnxruntime as ort

    session = ort.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    outputs = session.run(None, {name: x.numpy() for name, x in inputs.items()})
    by_torch = expected if isinstance(expected, tuple) else (expected,)
    for actual, wanted in zip(outputs, by_torch, strict=True):
        difference = float(np.abs(actual - wanted.numpy()).max())
        legal = PARITY * max(1.0, float(wanted.abs().max()))
        if not difference <= legal:  # also if it is NaN
            raise ParityError(f"{path.name} differs from torch by {difference:.2g}; at most {legal:.2g} is legal")


def can_export() -> bool:
    """Whether torch's ONNX exporter has what it needs."""
    return all(importlib.util.find_spec(package) is not None for package in ("onnx", "onnxscript"))


def _move_unfinished(folder: Path) -> None:
    """Move the trained edge to `edges`, unless an edge to the same old version was fitted there meanwhile."""
    if not (folder / UNEXPORTED_EDGES).exists():
        return
    (folder / "edges").mkdir(exist_ok=True)
    for place in (folder / UNEXPORTED_EDGES).iterdir():
        if not (folder / "edges" / place.name).exists():
            place.rename(folder / "edges" / place.name)
    shutil.rmtree(folder / UNEXPORTED_EDGES)


def _learned_edge(trained: Trained, folder: Path) -> str | None:
    """Name of the old version that the trained edge leads to; only fitted edges have `support`."""
    edges = {p.parent.name: json.loads(p.read_text()) for p in folder.glob("edges/*/edge.json")}
    trained_to = (old for old, edge in edges.items() if edge["kind"] == trained.edge_kind and not edge.get("support"))
    return next(trained_to, None)


def _real_images(trained: Trained, data: Data) -> Tensor:
    first = min(PARITY_IMAGES, len(data.gallery))
    image_BCHW, _ = ImageDataset(data.gallery, trained.recipe.preprocess).__getitems__(list(range(first)))
    return image_BCHW if trained.psi is None else image_BCHW[_stable_or_all(trained.psi.is_stable(image_BCHW))]


def _stable_or_all(stable_B: Tensor) -> Tensor:
    """The mask of stable rows; of all rows if none is stable."""
    return stable_B if stable_B.any() else torch.ones_like(stable_B)


def _random_units(dim: int) -> Tensor:
    return F.normalize(torch.randn(PARITY_IMAGES, dim, generator=torch.Generator().manual_seed(0)))


def _random_items(edge: ItemEdge, dim: int, side_dim: int) -> dict[str, Tensor]:
    side = {"side": torch.randn(PARITY_IMAGES, side_dim, generator=torch.Generator().manual_seed(1))}
    inputs = {"embedding": _random_units(dim), **(side if side_dim else {})}
    kept_B = _stable_or_all(edge.is_stable(*inputs.values()))
    return {name: x[kept_B] for name, x in inputs.items()}


def _torch_outputs(module: nn.Module, *inputs: Tensor) -> Any:
    with torch.inference_mode():
        return module.eval()(*inputs)


def _card(trained: Trained, report: Report, data: Data, name: str, *, exported: bool) -> Card:
    return Card(
        name=name,
        dim=trained.dim,
        space={"kind": trained.recipe.space},
        preprocess=trained.recipe.preprocess if exported else None,
        side_dim=trained.side_dim,
        method=trained.recipe.method,
        recipe=trained.recipe.as_json(),
        data={
            "fingerprint": data.train.fingerprint,
            "images": len(data.train),
            "classes": data.classes,
            "queries": len(data.query),
            "items": len(data.gallery),
            "skipped": data.skipped,
        },
        metrics={
            pair: {metric: vars(score) for metric, score in scores(measured).items()}
            for pair, measured in report.rows().items()
        },
    )
