"""TRAINING PATH: from a recipe to a version folder, top to bottom in `train`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import lightning
import torch
import torch.nn.functional as F
from torch import nn

from index.errors import InvalidArgument, did_you_mean
from index.version import CARD, EdgeKind
from index.version_folder.new_folder import check_target
from training import processes
from training.data.checks import warn_of_repeats
from training.data.images import Data, ImageSet
from training.evaluation.report import report_version
from training.export import write_version
from training.fitting import checkpoint_of, cpu_threads, fit
from training.folder_lock import FolderInUse, lock_folder, wait_until_unlocked
from training.losses.losses import UNKNOWN, class_means, class_radii
from training.measurement import measure, run_over
from training.method import Method, OldSummary
from training.module import PsiTraining, Training
from training.networks.backbones import Frozen, build_backbone
from training.networks.heads import linear_weight
from training.networks.side_information import KINDS, Psi, build_psi, recipe_of_psi
from training.plan_checks import check_plan, check_same_encoder, check_sizes
from training.recipe_checks import warn_of_slow_precision
from training.recipes import RECIPES, Recipe, find_recipe
from training.references import References, differences, folder_of, is_trained, reference_recipes
from training.sources import load_data
from training.stored_embeddings import StoredVersion, is_encoder_only, open_stored, with_encoder_embeddings
from training.trained import Trained, blank_old, build_method
from training.validation import Validation, hold_out


def train(
    recipe: Recipe,
    out: Path,
    progress: bool = True,
    data: Data | None = None,
    references: References | None = None,
) -> Path:
    """Train a version, measure it, and export it.

    A training that was stopped goes on from its last finished epoch, and ends as if it had not been stopped. Processes
    that `torchrun` started train together; the first of them measures and exports.

    Args:
        recipe: what to train.
        out: the version folder to write; its name becomes the version's. A version folder that exists is replaced.
        progress: show a progress bar, print the report, and keep it (as HTML) and logs (TensorBoard, CSV) beside `out`.
        data: the result of `recipe_data` for the recipe, where it has been read already.
        references: the recipes that this one names, from `training.references`; None: those of `reference_recipes`.

    Returns:
        `out`.

    Raises:
        RegraftError: the recipe, its data or the old version cannot be used, another training writes `out` already, the
            training diverged, or the disk is full; no part of a version is left then, and an earlier version stays.
        KeyboardInterrupt: stopped by Ctrl-C or SIGTERM; likewise.
    """
    references = {**reference_recipes(recipe), **(references or {})}
    check_plan(recipe, out, references)
    if progress and processes.is_rank_zero():
        warn_of_slow_precision(recipe)
    with lock_folder(out):
        data = data or recipe_data(recipe)
        train_data, held = hold_out_images(recipe, data)
        classes = len(data.classes)
        old = load_old(recipe, progress, references)
        if old is not None:
            check_target(out, old.version)
            check_sizes(recipe, blank_old(classes, old.dim, old.side_dim, old.space), classes, references)
        if progress:
            warn_of_repeats(data, log=processes.is_rank_zero())
        validation = (
            None if held is None else Validation(held, recipe.patience, recipe.space if old is None else old.space)
        )
        independent = load_reference(recipe, "independent", progress, references)

        with cpu_threads(recipe.threads):
            lightning.seed_everything(recipe.seed, verbose=False)
            old_summary = None if old is None else summarise_old(old, train_data)
            new_dim, new_head = (0, None) if independent is None else (independent.dim, independent.head)
            method = build_method(recipe, classes, old_summary, new_dim, new_head)
            backbone = new_backbone(recipe) if method.trains_encoder else reuse_backbone(independent, recipe)
            psi = train_psi(recipe, train_data, out, progress)
            module = build_module(recipe, backbone, method, old, independent, psi)
            fit(module, train_data, validation, out=out, progress=progress)

            # An encoder that is taken over knows the classes that it was trained on, one for each row of its head.
            taken = None if method.trains_encoder else independent
            head, known = (method.head_weights(), data.classes) if taken is None else (taken.head, taken.classes)
            old_dim, old_side_dim = (0, 0) if old is None else (old.dim, old.side_dim)
            trained = Trained(recipe, backbone, method, known, old_dim, head, psi, old_side_dim)
        with processes.barrier_after():
            if processes.is_rank_zero():
                finish(trained, old, data, out, progress)
    return out


def finish(trained: Trained, old: Trained | StoredVersion | None, data: Data, out: Path, progress: bool) -> None:
    """Measure the trained version, export it, and remove its checkpoints."""
    report = measure(trained, old, data)
    old_version = None if old is None else old.version
    write_version(trained, report, data, old_version, out)
    remove_checkpoints(out)
    if progress:
        print(*report.lines(), sep="\n")
        report_version(out, old_version, data)


def remove_checkpoints(out: Path) -> None:
    """Remove the checkpoints of a training that has become a version."""
    checkpoint_of(out).unlink(missing_ok=True)
    checkpoint_of(psi_of(out)).unlink(missing_ok=True)


def wait_for_training(out: Path, say: Callable[[str], None]) -> None:
    """Return once no other process trains a version, having cleared what a killed one left; `say` is told of the wait.

    Raises:
        FolderInUse: this process itself trains it.
    """
    wait_until_unlocked(out, say, remove_checkpoints)


def recipe_data(recipe: Recipe) -> Data:
    """The images a recipe trains on and is measured on."""
    path = recipe.old_embeddings
    stored = (Path(path), open_stored(recipe.old).version) if path else None
    data = load_data(recipe.data, recipe.root, recipe.unreadable, stored)
    data = data.split(recipe.classes, recipe.class_share, recipe.fraction, recipe.split_seed)
    if stored is None and is_encoder_only(recipe.old):
        data = with_encoder_embeddings(data, open_stored(recipe.old).version)
    return data


def load_old(recipe: Recipe, progress: bool, references: References) -> Trained | StoredVersion | None:
    """The old version in torch, or as embeddings: from a file, or by its encoder.onnx where it has no weights.

    Raises as `load_reference`.
    """
    if recipe.old_embeddings or is_encoder_only(recipe.old):
        return open_stored(recipe.old)
    return load_reference(recipe, "old", progress, references)


def load_reference(recipe: Recipe, field: str, progress: bool, references: References) -> Trained | None:
    """A version to train against; None where the recipe names none. Raises as `reference_folder`.

    Raises:
        InvalidVersionFolder: the folder does not match its card.
    """
    folder = reference_folder(recipe, field, progress, references)
    return None if folder is None else Trained.load(folder)


def reference_folder(recipe: Recipe, field: str, progress: bool, references: References) -> Path | None:
    """The folder of the version that a recipe names, by folder or by recipe (trained into `RUNS` if it is not yet).

    Raises:
        InvalidArgument: neither, or see `is_trained`.
    """
    reference: str = getattr(recipe, field)
    if not reference:
        return None
    if field in references:
        return ensure_trained(field, references[field], progress)
    if not (Path(reference) / CARD).is_file():
        raise InvalidArgument(
            f"{field}={reference} is neither a version folder nor a recipe{did_you_mean(reference, RECIPES)}; "
            f"train it first, or set {field}=FOLDER",
            pointer=f"/{field}",
        )
    return Path(reference)


def ensure_trained(field: str, recipe: Recipe, progress: bool) -> Path:
    """The folder of a recipe's version, for the field that names it; trained now if it is not yet.

    Where another process trains it, this one waits and looks again; processes that train together do not wait, as all
    must see the same. With `progress`, prints whether it is trained or used, and what differs from the named recipe.

    Raises:
        InvalidArgument: see `is_trained`.
    """

    def say(text: str) -> None:
        if progress and processes.is_rank_zero():
            print(text)

    out = folder_of(recipe)
    if processes.world() == 1:
        wait_for_training(out, say)
    if is_trained(field, recipe):
        say(f"using {out} unchanged")
        return out
    changed = ", ".join(differences(recipe, find_recipe(recipe.name)))
    say(f"training {out} first{f', with {changed}' if changed else ''}")
    try:
        return train(recipe, out, progress)
    except FolderInUse:
        if processes.world() > 1:
            raise
        return ensure_trained(field, recipe, progress)


def new_backbone(recipe: Recipe) -> nn.Module:
    """The backbone to train, with fresh or pretrained weights."""
    return build_backbone(
        recipe.backbone,
        recipe.preprocess.channels,
        recipe.dim,
        pretrained=recipe.pretrained,
        weights=recipe.weights,
        last_relu=recipe.last_relu,
    )


def train_psi(recipe: Recipe, data: Data, out: Path, progress: bool) -> Psi | None:
    """The recipe's side-information, trained on the same images as its encoder; None where it has none.

    Raises:
        InvalidArgument: it cannot be made.
    """
    psi_recipe = recipe_of_psi(recipe)
    lightning.seed_everything(psi_recipe.seed, verbose=False)
    psi = build_psi(psi_recipe, pretrained=recipe.pretrained, weights=recipe.weights)
    if psi is not None:
        objective = KINDS[psi_recipe.side](psi_recipe, len(data.classes))
        fit(PsiTraining(psi, objective, psi_recipe), data, out=psi_of(out), progress=progress)
    return psi


def hold_out_images(recipe: Recipe, data: Data) -> tuple[Data, ImageSet | None]:
    """The images left to train on, and those to measure on after every epoch, if the recipe holds any out."""
    if not recipe.held_out:
        return data, None
    kept, held = hold_out(data.train, recipe.held_out, recipe.split_seed)
    return replace(data, train=kept), held


def psi_of(out: Path) -> Path:
    """The path beside which side-information keeps its checkpoint and logs while it is trained."""
    return out.with_name(f"{out.name}-psi")


def reuse_backbone(independent: Trained | None, recipe: Recipe) -> nn.Module:
    """The backbone of the independently trained version, for a method that trains none of its own.

    Raises:
        InvalidArgument: there is none, or a field of its encoder differs from the recipe's.
    """
    if independent is None:
        raise InvalidArgument(
            f"method {recipe.method} requires independent=FOLDER, a new version", pointer="/independent"
        )
    check_same_encoder(independent.recipe, recipe)
    return independent.backbone


def build_module(
    recipe: Recipe,
    backbone: nn.Module,
    method: Method,
    old: Trained | StoredVersion | None,
    independent: Trained | None,
    psi: Psi | None,
) -> Training:
    """The module that `fit` trains: backbone, method, and the frozen models, each with its own preprocessing.

    An old version of embeddings alone has no model; side-information is used only by an edge that moves items.
    """
    moves_items = method.edge_kind is EdgeKind.FORWARD
    frozen: dict[str, Frozen] = {}
    if isinstance(old, Trained):
        frozen["old"] = Frozen(old.raw, old.recipe.preprocess)
        if moves_items and old.psi is not None:
            frozen["old_psi"] = Frozen(old.psi, old.recipe.preprocess)
    if independent is not None and method.trains_encoder:  # else it is the backbone
        frozen["independent"] = Frozen(independent.raw, independent.recipe.preprocess)
    if moves_items and psi is not None:
        frozen["psi"] = Frozen(psi, recipe.preprocess)
    return Training(backbone, method, recipe, **frozen)


def summarise_old(old: Trained | StoredVersion, data: Data) -> OldSummary:
    """Statistics of the old version on the new data: its mean embedding of each class, and which classes it knows.

    An old version whose embeddings come from a file knows every class, and has no head.
    """
    images = data.train.dense()
    if isinstance(old, StoredVersion):
        raw_SN, known, head = torch.from_numpy(old.embed(images)), data.classes, None
    else:
        raw_SN, known, head = run_over(images, old.raw, old.recipe.preprocess), old.classes, old.head
    unit_SN, label_S = F.normalize(raw_SN), torch.from_numpy(images.labels)
    classes = len(data.classes)
    centre_CN = class_means(unit_SN, label_S, classes)
    head_row = {name: row for row, name in enumerate(known)}
    label_C = torch.tensor([head_row.get(name, UNKNOWN) for name in data.classes])
    weight_KN, bias_K = head or (None, None)
    scale = None
    if weight_KN is not None and isinstance(old, Trained):
        weight_KN, scale = linear_weight(old.recipe.head, weight_KN)
    return OldSummary(
        mean_CN=class_means(raw_SN, label_S, classes),
        label_C=label_C,
        weight_KN=weight_KN,
        bias_K=bias_K,
        head_scale=scale,
        space=old.space,
        centre_CN=centre_CN,
        radius_C=class_radii(unit_SN, label_S, centre_CN),
        side_dim=old.side_dim,
        reach=float(raw_SN.norm(dim=1).max().asinh()) if old.space == "lorentz" else 0.0,
    )
