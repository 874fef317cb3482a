"""What no training can be made of: refused by name before anything is read or trained, in a training and in a sweep."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from index.errors import InvalidArgument
from index.version import Preprocess
from staging.inputs.recipes import quick
from training import plan_checks
from training import train as path
from training.comparison.sweep import sweep
from training.first_batch import try_batch
from training.methods import METHODS, method_options
from training.recipe_checks import LIMITS, OPTION_LIMITS, check_choices, check_numbers, warn_of_slow_precision
from training.recipes import RECIPES
from training.references import reference_recipes
from training.trained import blank_old, build_method


@pytest.mark.parametrize(
    ("field", "value", "legal"),
    [
        ("batch_size", 0, "1 or more"),
        ("epochs", 0, "1 or more"),
        ("side_epochs", -1, "0 or more"),
        ("rate", float("nan"), "0 or more"),
        ("weight_decay", float("inf"), "0 or more"),
        ("dim", 0, "1 to 65536"),
        ("dim", 70_000, "1 to 65536"),
        ("side_dim", -1, "0 to 65536"),
        ("label_smoothing", 2.0, "0 to 1"),
        ("classes", 1, "2 or more"),
        ("seed", 5_000_000_000, "0 to 2147483647"),
        ("workers", -1, "0 or more"),
        ("threads", 100_000, "0 to 1024"),
        ("held_out", 0.95, "0 to 0.9"),
    ],
)
def test_a_number_out_of_range_is_refused_with_the_legal_ones(
    field: str, value: float, legal: str, tmp_path: Path
) -> None:
    for start in (path.train, lambda recipe, out: sweep(recipe, 1, out)):
        with pytest.raises(InvalidArgument, match=f"{field} of digits_bct must be {legal}, not") as refused:
            start(quick("digits_bct", **{field: value}), tmp_path / "v")
        assert refused.value.pointer == f"/{field}"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "option", "value", "legal"),
    [
        ("digits_advbct", "hidden", 0, "1 to 65536"),
        ("digits_fct", "branch", 10**23, "1 to 65536"),
        ("digits_lwf", "temperature", 0.0, "1e-06 or more"),
        ("digits_hoc", "weight", float("nan"), "0 or more"),
        ("digits_hoc", "sharpness", float("inf"), "0 or more"),
        ("digits_hot_refresh", "hardest", -1, "0 or more"),
        ("digits_contrast", "temperature", 0.0, "1e-06 or more"),
        ("digits_hbct", "density", 0.0, "1e-06 or more"),
    ],
)
def test_an_option_out_of_range_is_refused_with_the_legal_ones(
    name: str, option: str, value: float, legal: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgument, match=f"{option} of {name} must be {legal}, not") as refused:
        path.train(quick(name, options={option: value}), tmp_path / "v")
    assert refused.value.pointer == f"/{option}"
    assert list(tmp_path.iterdir()) == []


def test_every_recipe_is_within_the_limits() -> None:
    for make in RECIPES.values():
        check_numbers(make())
        check_choices(make())
    assert set(LIMITS) <= set(vars(RECIPES["digits_v1"]()))


def test_every_option_that_is_a_number_has_limits_and_its_default_is_within() -> None:
    for method in METHODS:
        numbers = {k: x for k, x in method_options(method).items() if type(x) in {int, float}}
        assert set(numbers) <= set(OPTION_LIMITS)
        check_numbers(replace(RECIPES["digits_v1"](), method=method, options=numbers))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"optimiser": "adamw"}, "optimiser must be one of adam, sgd"),
        ({"precision": "half"}, "precision must be one of 32-true, bf16-mixed, 16-mixed"),
        ({"augment": "mirror"}, "augment 'mirror' is unknown; legal: none, "),
        ({"side_augment": "mirror"}, "augment 'mirror' is unknown; legal: none, "),
        ({"patience": 1}, "patience requires held_out"),
        ({"head": "lorentz_mlr"}, "method bct cannot train head=lorentz_mlr: hbct requires head=lorentz_mlr, and only"),
        ({"method": "hbct", "space": "lorentz", "options": {}}, "method hbct cannot train head=softmax"),
        ({"warmup_epochs": 3}, "warmup_epochs must be 0 to 2, the epochs of the training, not 3"),
        *(
            ({"milestones": m}, "milestones must rise from 1 to below epochs=2")
            for m in ((2,), (0,), (-1,), (5, 1), (1, 1))
        ),
    ],
)
def test_what_the_loop_does_not_have_is_refused_before_anything_is_read(
    changes: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(path, "recipe_data", lambda _: pytest.fail("read before it was refused"))
    monkeypatch.setattr("training.references.RUNS", tmp_path / "runs")
    for start in (path.train, lambda recipe, out: sweep(recipe, 1, out)):
        with pytest.raises(InvalidArgument, match=said):
            start(quick("digits_bct", old="digits_v1", **changes), tmp_path / "v")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("precision", "on_cpu", "supported", "warns"),
    [
        ("bf16-mixed", True, False, True),
        ("bf16-mixed", True, True, False),
        ("bf16-mixed", False, False, False),
        ("32-true", True, False, False),
    ],
)
def test_a_cpu_that_cannot_compute_in_bfloat16_is_named_before_hours_of_training(
    precision: str,
    on_cpu: bool,
    supported: bool,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: not on_cpu)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: supported)

    warn_of_slow_precision(quick("digits_v1", precision=precision))

    assert ("precision=bf16-mixed is much slower than 32-true" in caplog.text) is warns


def test_a_reference_that_is_there_may_be_of_a_machine_with_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    recipe = quick("digits_bct", old="digits_v1")
    old = replace(reference_recipes(recipe)["old"], precision="16-mixed")

    for there in (True, False):
        monkeypatch.setattr(plan_checks, "is_trained", lambda *_, there=there: there)
        with nullcontext() if there else pytest.raises(InvalidArgument, match="requires a GPU"):
            plan_checks.check_plan(recipe, tmp_path / "v", {"old": old})


@pytest.mark.parametrize(
    ("name", "changes", "independent", "said"),
    [
        ("digits_bct", {"head": "softmix"}, {}, "head 'softmix' is unknown"),
        ("digits_bct", {"space": "l2"}, {}, "requires space=cosine, not l2"),
        ("digits_fct", {"side": "simclr"}, {}, "side=simclr requires two views"),
        ("digits_bct", {"backbone": "resnet"}, {}, "backbone 'resnet' is unknown"),
        ("digits_oca", {"dim": 16}, {}, "oca's dim must be .* above 16, not 16"),
        ("digits_fct", {}, {"dim": 8}, "the independent version's dim is 8, the recipe's 16"),
        ("digits_bt2", {}, {"backbone": "resnet"}, "backbone 'resnet' is unknown"),
        (
            "digits_fct",
            {"space": "l2", "options": {"objective": "kl"}},
            {"space": "l2", "head": "norm_softmax"},
            "requires an independent version with head=softmax",
        ),
    ],
)
def test_nothing_is_trained_first_for_a_recipe_that_cannot_be(
    name: str,
    changes: dict[str, Any],
    independent: dict[str, Any],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("training.references.RUNS", tmp_path / "runs")
    monkeypatch.setattr(path, "fit", lambda *_, **__: pytest.fail("trained before it was refused"))
    recipe = quick(name, old="digits_v1", **changes)
    references = reference_recipes(recipe)
    if independent:
        references = {**references, "independent": replace(references["independent"], **independent)}
    with pytest.raises(InvalidArgument, match=said):
        path.train(recipe, tmp_path / "v", progress=False, references=references)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_trained_first_for_a_sweep_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.references.RUNS", tmp_path / "runs")
    monkeypatch.setattr(path, "fit", lambda *_, **__: pytest.fail("trained before it was refused"))
    with pytest.raises(InvalidArgument, match=r"oca's dim must be .* above 16, not 16"):
        sweep(quick("digits_oca", old="digits_v1", dim=16), 1, tmp_path / "v")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("digits_v1", {"backbone": "timm/vit_tiny_patch16_224"}, "timm/vit_tiny_patch16_224 .* of 8 x 8 pixels: .*224"),
        ("digits_v1", {"backbone": "timm/resnet18", "batch_size": 1}, "timm/resnet18 .* on one image per process: "),
        ("digits_advbct", {"batch_size": 1}, "method advbct cannot be trained on one image per process: "),
        ("digits_fct", {"batch_size": 1}, "method fct cannot be trained on one image per process: "),
    ],
)
def test_sizes_that_the_encoder_or_the_method_cannot_take_are_refused_first(
    name: str, changes: dict[str, Any], said: str, v1: Path, independent: Path, tmp_path: Path
) -> None:
    recipe = quick(name, **changes)
    named = {"old": str(v1) if recipe.old else "", "independent": str(independent) if recipe.independent else ""}
    with pytest.raises(InvalidArgument, match=said):
        path.train(replace(recipe, **named), tmp_path / "v", progress=False)
    assert list(tmp_path.iterdir()) == []


def test_a_backbone_whose_gradient_no_gpu_gives_deterministically_is_refused_before_it_is_trained_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def tried(backbone: str) -> None:
        recipe = quick("digits_v1", backbone=backbone, preprocess=Preprocess(32, 32))
        try_batch(recipe, build_method(recipe, 5, None, 0), None, 0)

    tried("timm/resnetblur18")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    tried("timm/resnet18")

    with pytest.raises(InvalidArgument, match="32 x 32 pixels: its reflection_pad2d_backward is not") as refused:
        tried("timm/resnetblur18")
    assert refused.value.pointer == "/backbone"


@pytest.mark.parametrize("method", METHODS)
def test_every_method_takes_the_batch_that_is_tried(method: str) -> None:
    dims = {"oca": 40, "bt2": 32}
    options = {"extra": 8} if method == "bt2" else {}
    recipe = quick("digits_v1", method=method, options=options, dim=dims.get(method, 16), side="autoencoder")
    recipe = replace(recipe, space="lorentz", head="lorentz_mlr") if method == "hbct" else recipe
    old = None if method == "independent" else blank_old(5, 16, 3, recipe.space)
    for independent_dim in (16,) if method in {"bt2", "fct"} else (0, 16):
        try_batch(recipe, build_method(recipe, 5, old, independent_dim), old, independent_dim)
