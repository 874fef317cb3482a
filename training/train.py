"""TRAINING PATH: from a recipe to a version folder, top to bottom in `train`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import lightning
import torch
import torch.nn.functional as F
from torch import nn

from index.errors import InvalidArgument, did_you_mean
from index.folder import load_version
from index.new_folder import check_target
from index.version import CARD, EdgeKind
from training import processes
from training.backbones import Frozen, build_backbone
from training.data import Data
from training.evaluate import measure, run_over
from training.export import write_version
from training.first_batch import try_batch
from training.fitting import checkpoint_of, cpu_threads, fit
from training.folder_lock import FolderInUse, lock_file, lock_folder, wait_until_unlocked
from training.heads import linear_weight
from training.losses import UNKNOWN, class_means, class_radii
from training.method import Method, OldSummary
from training.module import PsiTraining, Training
from training.recipe_checks import check_choices, check_numbers
from training.recipes import RECIPES, Recipe, find_recipe, recipe_from_json
from training.references import FIELDS, NO_ENCODER_METHOD, References, differences, reference_recipe
from training.report import report_version
from training.side_information import KINDS, Psi, build_psi, dim_of, recipe_of_psi
from training.sources import load_data
from training.stored_embeddings import StoredVersion, is_encoder_only, open_stored, with_encoder_embeddings
from training.trained import Trained, blank_old, build_method
from training.validation import Validation, hold_out

RUNS = Path("runs")
"""Folder of the versions that recipes train against by naming another recipe."""


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
    with lock_folder(out):
        data = data or recipe_data(recipe)
        classes = len(data.classes)
        old = load_old(recipe, progress, references)
        if old is not None:
            check_target(out, old.version)
            check_sizes(recipe, blank_old(classes, old.dim, old.side_dim, old.space), classes, references)
        train_data, validation = hold_out_validation(recipe, data, old)
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

            head = method.head_weights() if method.trains_encoder or independent is None else independent.head
            old_dim, old_side_dim = (0, 0) if old is None else (old.dim, old.side_dim)
            trained = Trained(recipe, backbone, method, data.classes, old_dim, head, psi, old_side_dim)
        with processes.barrier_after():
            if processes.is_rank_zero():
                finish(trained, old, data, out, progress)
    return out


def finish(trained: Trained, old: Trained | StoredVersion | None, data: Data, out: Path, progress: bool) -> None:
    """Measure the trained version, export it, and remove its checkpoints."""
    report, old_version = measure(trained, old, data), None if old is None else old.version
    write_version(trained, report, data, old_version, out)
    checkpoint_of(out).unlink(missing_ok=True)
    checkpoint_of(psi_of(out)).unlink(missing_ok=True)
    if progress:
        print(*report.lines(), sep="\n")
        report_version(out, old_version, data)


def check_plan(recipe: Recipe, out: Path, references: References) -> None:
    """Refuse a training that cannot work before anything is read or trained.

    Raises:
        InvalidArgument: a field of a recipe, the folder, an encoder that cannot be taken over, or see `is_trained`.
    """
    for each in (recipe, *references.values()):
        check_numbers(each)
    check_choices(recipe)
    check_target(out)
    for field, reference in references.items():
        # A running training of it decides what it becomes; a trained one may come from a machine with a GPU.
        if not lock_file(RUNS / reference.name).exists() and not is_trained(field, reference):
            check_choices(reference)
            check_planned_sizes(reference, reference_recipes(reference))
    if recipe.method == NO_ENCODER_METHOD and "independent" in references:
        check_same_encoder(references["independent"], recipe)
    check_planned_sizes(recipe, references)


def recipe_data(recipe: Recipe) -> Data:
    """The images a recipe trains on and is measured on."""
    path = recipe.old_embeddings
    stored = (Path(path), open_stored(recipe.old).version) if path else None
    data = load_data(recipe.data, recipe.root, recipe.unreadable, stored)
    data = data.split(recipe.classes, recipe.class_share, recipe.fraction, recipe.split_seed)
    if stored is None and is_encoder_only(recipe.old):
        data = with_encoder_embeddings(data, open_stored(recipe.old).version)
    return data


def reference_recipes(recipe: Recipe) -> References:
    """Field -> the recipe that it names, changed by `reference_recipe` to go with this one."""
    return {field: reference_recipe(recipe, field) for field in FIELDS if getattr(recipe, field) in RECIPES}


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


def check_planned_sizes(recipe: Recipe, references: References) -> None:
    """`check_sizes` before anything is read or trained, where the old version's sizes follow from its recipe."""
    classes, old = 2, references.get("old")  # a method that takes two classes takes any number
    if not recipe.old and not recipe.old_embeddings:
        check_sizes(recipe, None, classes, references)
    elif old is not None and not old.old:  # else its method may store another dimension
        check_sizes(recipe, blank_old(classes, old.dim, dim_of(old), old.space), classes, references)


def check_sizes(recipe: Recipe, old: OldSummary | None, classes: int, references: References) -> None:
    """Refuse sizes and options that cannot work before hours go into the versions that the recipe needs.

    Args:
        recipe: to be trained.
        old: from `blank_old`.
        classes: C.
        references: the recipes that it names.

    Raises:
        InvalidArgument: from the method; names legal sizes and options.
    """
    independent_dim, independent = planned_dim(recipe, references), references.get("independent")
    bias = torch.zeros(classes) if independent is None or independent.head == "softmax" else None  # no other has one
    head = (torch.zeros(classes, independent_dim), bias) if independent_dim else None
    method = build_method(recipe, classes, old, independent_dim, head)
    if independent_dim is not None:
        try_batch(recipe, method, old, independent_dim)


def planned_dim(recipe: Recipe, references: References) -> int | None:
    """Dimension of the independent version before it is trained; 0 without one, None where it is unknown."""
    if not recipe.independent:
        return 0
    if "independent" in references:
        return references["independent"].dim
    folder = Path(recipe.independent)
    return load_version(folder).card.dim if (folder / CARD).is_file() else None


def ensure_trained(field: str, recipe: Recipe, progress: bool) -> Path:
    """The folder below `RUNS` of a recipe's version, for the field that names it; trained now if it is not yet.

    Where another process trains it, this one waits and looks again; processes that train together do not wait, as all
    must see the same. With `progress`, prints whether it is trained or used, and what differs from the named recipe.

    Raises:
        InvalidArgument: see `is_trained`.
    """

    def say(text: str) -> None:
        if progress and processes.is_rank_zero():
            print(text)

    out = RUNS / recipe.name
    if processes.world() == 1:
        wait_until_unlocked(out, say)
    if is_trained(field, recipe):
        say(f"{out} is used as it is")
        return out
    changed = ", ".join(differences(recipe, find_recipe(recipe.name)))
    say(f"{out} is trained first{f', with {changed}' if changed else ''}")
    try:
        return train(recipe, out, progress)
    except FolderInUse:
        if processes.world() > 1:
            raise
        return ensure_trained(field, recipe, progress)


def is_trained(field: str, recipe: Recipe) -> bool:
    """Whether the version of exactly this recipe is below `RUNS`.

    Raises:
        InvalidArgument: its folder was trained with other settings; names these, and the ways out.
    """
    out = RUNS / recipe.name
    if not (out / CARD).is_file():
        return False
    if changed := ", ".join(differences(recipe, recipe_from_json(load_version(out).card.recipe))):
        raise InvalidArgument(
            f"{out} is there, and was trained without {changed}: {field}={out} trains against it as it is, "
            f"`regraft train {recipe.name} --overwrite` with these settings replaces it",
            pointer=f"/{field}",
        )
    return True


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
    own = recipe_of_psi(recipe)
    lightning.seed_everything(own.seed, verbose=False)
    psi = build_psi(own, pretrained=recipe.pretrained, weights=recipe.weights)
    if psi is not None:
        fit(PsiTraining(psi, KINDS[own.side](own, len(data.classes)), own), data, out=psi_of(out), progress=progress)
    return psi


def hold_out_validation(
    recipe: Recipe, data: Data, old: Trained | StoredVersion | None
) -> tuple[Data, Validation | None]:
    """The images left to train on, and the validation on the held-out rest after every epoch."""
    if not recipe.held_out:
        return data, None
    kept, held = hold_out(data.train, recipe.held_out, recipe.split_seed)
    return replace(data, train=kept), Validation(held, recipe.patience, recipe.space if old is None else old.space)


def psi_of(out: Path) -> Path:
    """The path beside which side-information keeps its checkpoint and logs while it is trained."""
    return out.with_name(f"{out.name}-psi")


def reuse_backbone(independent: Trained | None, recipe: Recipe) -> nn.Module:
    """The backbone of the independently trained version, for a method that trains none of its own.

    Raises:
        InvalidArgument: there is none, or a field of its encoder differs from the recipe's.
    """
    if independent is None:
        raise InvalidArgument(f"method {recipe.method} needs independent=FOLDER, a new version", pointer="/independent")
    check_same_encoder(independent.recipe, recipe)
    return independent.backbone


def check_same_encoder(independent: Recipe, recipe: Recipe) -> None:
    """Refuse an independent version whose encoder differs from the recipe's.

    Raises:
        InvalidArgument: names the field that differs.
    """
    for field in ("backbone", "dim", "last_relu", "preprocess", "space"):
        actual, expected = getattr(independent, field), getattr(recipe, field)
        if actual != expected:
            raise InvalidArgument(
                f"the independent version's {field} is {actual}, the recipe's {expected}", pointer=f"/{field}"
            )


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
    old_model = old if isinstance(old, Trained) else None
    moves_items = method.edge_kind is EdgeKind.FORWARD
    frozen_new = independent if method.trains_encoder else None  # else it is the backbone
    return Training(
        backbone,
        method,
        recipe,
        old=None if old_model is None else Frozen(old_model.raw, old_model.recipe.preprocess),
        independent=None if frozen_new is None else Frozen(frozen_new.raw, frozen_new.recipe.preprocess),
        old_psi=Frozen(old_model.psi, old_model.recipe.preprocess)
        if moves_items and old_model and old_model.psi
        else None,
        psi=Frozen(psi, recipe.preprocess) if moves_items and psi else None,
    )


def summarise_old(old: Trained | StoredVersion, data: Data) -> OldSummary:
    """Statistics of the old version on the new data: its mean embedding of each class, and which classes it knows.

    An old version whose embeddings come from a file knows every class, and has no head.
    """
    images = data.train.dense()
    if isinstance(old, StoredVersion):
        raw_SN, known, head = torch.from_numpy(old.embed(images)), data.classes, None
    else:
        raw_SN, known, head = run_over(images, old.raw, old.recipe.preprocess), old.classes, old.head
    unit_SN, label_S, classes = F.normalize(raw_SN), torch.from_numpy(images.labels), len(data.classes)
    centre_CN = class_means(unit_SN, label_S, classes)
    rows = {name: row for row, name in enumerate(known)}
    label_C = torch.tensor([rows.get(name, UNKNOWN) for name in data.classes])
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
    )
