"""l2, lwf, contrast, hot_refresh, hoc and advbct: which samples, which options, and where gradients go."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from index.errors import InvalidArgument
from index.version import EdgeKind
from tensors import circle, draw
from training.losses import contrasts, losses
from training.method import Classifier, EmbeddedBatch, MethodContext, OldSummary
from training.methods import METHODS
from training.methods.advbct import AdvBct
from training.methods.compatible import Compatible, adacos_scale
from training.methods.contrast import Contrast
from training.methods.hoc import Hoc
from training.methods.hot_refresh import HotRefresh
from training.methods.l2 import L2
from training.methods.lwf import Lwf
from training.networks.heads import Softmax

CLASSES = 4
LABELS = torch.tensor([0, 1, 2, 3, 0, 2])
KNOWN = torch.tensor([True, True, False, False, True, False])
BASELINES = {
    "l2": L2,
    "lwf": Lwf,
    "contrast": Contrast,
    "hot_refresh": HotRefresh,
    "hoc": Hoc,
    "advbct": AdvBct,
}


def old_version(dim: int = 3) -> OldSummary:
    """Knows classes 0 and 1 of four."""
    return OldSummary(
        mean_CN=draw(CLASSES, dim, seed=5),
        label_C=torch.tensor([0, 1, losses.UNKNOWN, losses.UNKNOWN]),
        weight_KN=draw(2, dim, seed=6),
        bias_K=draw(2, seed=7),
        centre_CN=F.normalize(draw(CLASSES, dim, seed=8)),
        radius_C=torch.tensor([0.1, 0.2, 0.3, 0.4]),
    )


def method_context(dim: int = 3, old: OldSummary | None = None) -> MethodContext:
    return MethodContext(dim, CLASSES, lambda d: Classifier(Softmax(d, CLASSES)), old or old_version())


def batch(dim: int = 3, progress: float = 0.0) -> EmbeddedBatch:
    new_BD = draw(len(LABELS), dim, seed=1).requires_grad_()
    return EmbeddedBatch(new_BD, LABELS, draw(len(LABELS), 3, seed=2).requires_grad_(), progress=progress)


def build(name: str, dim: int = 3, **options: object) -> Compatible:
    torch.manual_seed(0)
    return BASELINES[name](method_context(dim), **options)


def advbct(**options: Any) -> AdvBct:
    torch.manual_seed(0)
    return AdvBct(method_context(), **options)


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize(("dim", "edge"), [(2, EdgeKind.ONNX), (3, EdgeKind.IDENTITY), (5, EdgeKind.TRUNCATE)])
def test_a_baseline_trains_the_backbone_and_leaves_the_old_side_alone(name: str, dim: int, edge: EdgeKind) -> None:
    method, given = build(name, dim), batch(dim, progress=0.3)
    step = method(given)
    step.loss.backward()

    assert given.old_BN.grad is None or name == "advbct"  # its discriminator reads a detached old side in training
    assert bool(given.new_BD.grad.isfinite().all())
    assert method.edge_kind is edge
    assert (method.edge is not None) == (edge is EdgeKind.ONNX)
    weight, _ = method.head_weights()
    assert weight.shape == (CLASSES, dim)


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_is_its_base_loss_plus_its_weighted_influence(name: str) -> None:
    given = batch()
    light, heavy = build(name, weight=1.0), build(name, weight=3.0)
    one, three = light(given), heavy(given)

    torch.testing.assert_close(one.logging["base"], light.classifier(given.new_BD, LABELS))
    torch.testing.assert_close(three.loss - one.loss, 2 * one.logging["influence"])


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_needs_an_old_version(name: str) -> None:
    with (
        pytest.raises(InvalidArgument, match=f"{name} requires an old version")
        if name != "contrast"
        else pytest.raises(InvalidArgument, match="requires an old version")
    ):
        BASELINES[name](replace(method_context(), old=None))


@pytest.mark.parametrize("method", ["l2", "advbct"])
def test_old_classes_alone_are_refused_where_the_old_version_knows_none(method: str) -> None:
    stranger = replace(old_version(), label_C=torch.full((CLASSES,), losses.UNKNOWN))

    with pytest.raises(InvalidArgument, match="knows none of the new classes; use over=all"):
        BASELINES[method](method_context(old=stranger), over="old")
    BASELINES[method](method_context(old=stranger), over="all")


@pytest.mark.parametrize("over", ["all", "old"])
@pytest.mark.parametrize("unit", [True, False])
def test_l2_is_half_the_square_of_all_or_of_old_classes_on_unit_or_raw_embeddings(over: str, unit: bool) -> None:
    given, terms = batch(), []
    for new, old, known in zip(given.new_BD.tolist(), given.old_BN.tolist(), KNOWN.tolist(), strict=True):
        lengths = (math.hypot(*new), math.hypot(*old)) if unit else (1, 1)
        if known or over == "all":
            terms.append(0.5 * sum((x / lengths[0] - y / lengths[1]) ** 2 for x, y in zip(new, old, strict=True)))

    made = build("l2", over=over, unit=unit).influence_loss(given)
    assert made.item() == pytest.approx(sum(terms) / len(terms))


def test_on_unit_vectors_l2_is_the_cosine_alignment_and_hot_refreshs_form_l2() -> None:
    given = batch()

    expected = losses.cosine_alignment(given.new_BD, given.old_BN)
    torch.testing.assert_close(build("l2").influence_loss(given), expected)
    torch.testing.assert_close(build("hot_refresh", form="l2").influence_loss(given), expected)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"among_new": False, "hardest": 2},
            partial(contrasts.regression_alleviating, temperature=0.05, among_new=False, hardest=2),
        ),
        ({"form": "triplet", "hardest": 1}, partial(contrasts.triplet, margin=0.8, hardest=1)),
        (
            {"form": "triplet", "margin": 0.3, "among_new": False},
            partial(contrasts.triplet, margin=0.3, among_new=False),
        ),
    ],
)
def test_hot_refresh_has_the_forms_of_its_public_code(options: dict[str, object], expected: Callable) -> None:
    given = batch()

    made = build("hot_refresh", **options).influence_loss(given)
    torch.testing.assert_close(made, expected(given.new_BD, given.old_BN, LABELS))


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("l2", "over", "new"),
        ("advbct", "over", "new"),
        ("hot_refresh", "form", "none"),
    ],
)
def test_an_unknown_choice_is_refused_by_name(name: str, option: str, value: object) -> None:
    with pytest.raises(InvalidArgument, match=option):
        build(name, **{option: value})


DIRECTIONS = ("l2", "lwf", "bct", "contrast", "hot_refresh", "hoc", "advbct", "oca", "bt2")
LENGTHS = {"l2": {"unit": False}, "lwf": {"logits": "raw"}, "bct": {"logits": "raw"}, "oca": {"logits": "raw"}}


@pytest.mark.parametrize("name", DIRECTIONS)
def test_a_space_in_which_lengths_count_is_for_what_trains_lengths(name: str) -> None:
    long = replace(old_version(), space="l2")
    either, both = method_context(5, long), replace(method_context(5, long), space="l2")

    with pytest.raises(InvalidArgument, match="requires an old version of space cosine, not l2") as refused:
        METHODS[name](either)
    assert refused.value.pointer == "/old"
    with pytest.raises(InvalidArgument, match="space=cosine, not l2") as refused:
        METHODS[name](both)
    assert refused.value.pointer == "/space"
    if name in LENGTHS:
        METHODS[name](both, **LENGTHS[name])
        with pytest.raises(InvalidArgument, match="space=cosine or l2, not lorentz"):
            METHODS[name](replace(both, space="lorentz"), **LENGTHS[name])


def test_lwf_distils_new_classes_only_and_everything_where_nothing_is_new() -> None:
    given, method = batch(), build("lwf")
    old = old_version()
    assert given.old_BN is not None
    new, taught = (losses.linear_logits(z, old.weight_KN, None, 16.0) for z in (given.new_BD, given.old_BN))
    all_known = Lwf(method_context(old=replace(old, label_C=torch.tensor([0, 1, 0, 1]))))

    torch.testing.assert_close(method.influence_loss(given), losses.distillation(new, taught, ~KNOWN, 2.0))
    torch.testing.assert_close(all_known.influence_loss(given), losses.distillation(new, taught, None, 2.0))


def test_lwf_reads_the_old_head_as_it_is_when_told_to() -> None:
    given, old = batch(), old_version()
    assert given.old_BN is not None
    new, taught = (losses.linear_logits(z, old.weight_KN, old.bias_K) for z in (given.new_BD, given.old_BN))

    expected = losses.distillation(new, taught, ~KNOWN, 2.0)
    torch.testing.assert_close(build("lwf", logits="raw").influence_loss(given), expected)
    with pytest.raises(InvalidArgument, match="logits must be one of cosine, raw"):
        build("lwf", logits="linear")


def test_without_a_scale_lwf_scales_cosines_by_the_old_heads_classes() -> None:
    head_KN = draw(5, 3, seed=6)
    method = Lwf(method_context(old=replace(old_version(), weight_KN=head_KN, bias_K=None)), scale=0.0)

    assert method.scale == adacos_scale(5)


def test_lwf_needs_the_old_head() -> None:
    with pytest.raises(InvalidArgument, match="saved without a classifier head"):
        Lwf(method_context(old=replace(old_version(), weight_KN=None, bias_K=None)))


def test_contrast_and_hot_refresh_are_one_loss_at_two_settings() -> None:
    given = batch()

    same = build("contrast", temperature=0.05).influence_loss(given)
    torch.testing.assert_close(same, build("hot_refresh").influence_loss(given))
    assert build("contrast").weight == 10
    assert build("hot_refresh").weight == 1


def test_extra_dimensions_do_not_enter_the_influence_loss() -> None:
    given = batch(5)
    moved = replace(given, new_BD=given.new_BD + torch.tensor([0.0, 0.0, 0.0, 9.0, -9.0]))

    for name in BASELINES:
        method = build(name, 5)
        torch.testing.assert_close(method.influence_loss(given), method.influence_loss(moved))


def test_advbct_draws_each_boundary_between_the_old_radius_and_the_threshold() -> None:
    method = advbct(threshold=0.8)
    for pull, share in ((-100.0, 0.0), (0.0, 0.5), (100.0, 1.0)):
        nn.init.constant_(method.elastic_C, pull)
        expected = [r + share * (0.8 - r) for r in (0.1, 0.2, 0.3, 0.4)]

        assert method.radius().tolist() == pytest.approx(expected)


def test_advbct_bounds_all_classes_and_can_leave_new_ones_alone() -> None:
    everywhere, given = advbct(), batch()
    (elastic_C,) = torch.autograd.grad(everywhere.influence_loss(given), everywhere.elastic_C)
    assert bool((elastic_C < 0).all())

    method, given = advbct(over="old"), batch()
    elastic_C, new_BD = torch.autograd.grad(method.influence_loss(given), [method.elastic_C, given.new_BD])

    assert bool((elastic_C[:2] < 0).all())  # a wider boundary is a smaller loss
    assert not elastic_C[2:].any()
    assert not new_BD[~KNOWN].any()


def test_advbct_leaves_a_class_without_a_radius_unbounded_and_its_gradients_finite() -> None:
    given, old = batch(), replace(old_version(), radius_C=torch.tensor([0.1, math.inf, 0.3, 0.4]))
    method = AdvBct(method_context(old=old))
    method.influence_loss(given).backward()

    assert method.radius().isfinite().tolist() == [True, False, True, True]
    assert bool(method.elastic_C.grad.isfinite().all())
    assert given.new_BD.grad.any(1).tolist() == (LABELS != 1).tolist()


def test_advbcts_boundary_acts_on_what_lies_between_two_classes() -> None:
    angles = [*torch.linspace(-5, 5, 11).tolist(), 80.0], [*torch.linspace(85, 95, 11).tolist(), 10.0]
    z = torch.cat([circle(*group) for group in angles]).float()  # in each class one sample looks like the other class
    label = torch.arange(2).repeat_interleave(12)
    centre = losses.class_means(z, label, 2)
    between = circle(45.0, 45.0).float()

    farthest = torch.linalg.vector_norm(z - centre[label], dim=1).reshape(2, 12).amax(1)
    assert float(losses.boundary_loss(between, centre, farthest)) == 0  # what it is without dropping outliers
    assert float(losses.boundary_loss(between, centre, losses.class_radii(z, label, centre))) > 0.3


def test_advbct_trains_the_discriminator_at_once_and_misleads_it_only_later() -> None:
    for progress, misled in ((0.0, False), (0.5, True)):
        method, given = advbct(), batch(progress=progress)
        method.adversarial_loss(given).backward()

        assert bool(given.new_BD.grad.abs().max() > 1e-8) is misled
        assert bool(method.discriminator.get_parameter("0.weight").grad.any())


def test_advbct_pushes_new_embeddings_towards_what_the_discriminator_calls_old() -> None:
    method, given = advbct(), batch(progress=0.9)
    method.eval()
    loss = method.adversarial_loss(given)
    (gradient,) = torch.autograd.grad(loss, given.new_BD)
    with torch.no_grad():
        before = method.discriminator(given.new_BD).mean()
        after = method.discriminator(given.new_BD - 0.1 * gradient / gradient.norm()).mean()

    assert after > before


def test_the_adversarial_loss_fades_out() -> None:
    method = advbct().eval()
    for progress in (0.0, 0.75, 1.0):
        step = method(batch(progress=progress))
        rest = step.logging["base"] + method.weight * step.logging["influence"]

        assert (step.loss - rest).item() == pytest.approx((1 - progress) * step.logging["adversarial"].item(), abs=1e-6)
        assert math.isfinite(step.loss.item())
