"""BCT: its three influence forms against naive loops, by raw and by cosine logits, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch

from index.errors import InvalidArgument
from index.version import EdgeKind
from naive import cross_entropy, log_softmax
from staging.inputs.recipes import quick
from tensors import draw
from training.losses.losses import UNKNOWN
from training.method import Classifier, EmbeddedBatch, MethodContext, OldSummary
from training.methods.bct import Bct
from training.methods.compatible import cosine_scale
from training.methods.lwf import Lwf
from training.networks.backbones import build_backbone
from training.networks.heads import HEADS, ArcFace, Softmax, linear_weight
from training.sources import load_data
from training.train import summarise_old
from training.trained import Trained, build_method

CLASSES, OLD_DIM, SCALE = 4, 3, 5.0
LABELS = [0, 1, 2, 3, 0, 2]


def old_version(rows: tuple[int, ...] = (1, UNKNOWN, 0, UNKNOWN), *, head: bool = True) -> OldSummary:
    """By default it knows classes 2 and 0, in that order, of four."""
    weight, bias = (draw(2, OLD_DIM, seed=6), draw(2, seed=7)) if head else (None, None)
    return OldSummary(
        draw(CLASSES, OLD_DIM, seed=5), torch.tensor(rows), weight, bias, centre_CN=draw(CLASSES, OLD_DIM, seed=8)
    )


def build(dim: int = OLD_DIM, old: OldSummary | None = None, smoothing: float = 0.0, **options: object) -> Bct:
    torch.manual_seed(0)
    given = old_version() if old is None else old
    return Bct(MethodContext(dim, CLASSES, lambda d: Classifier(Softmax(d, CLASSES), smoothing), given), **options)


def batch(dim: int = OLD_DIM) -> EmbeddedBatch:
    new_BD = draw(len(LABELS), dim, seed=1).requires_grad_()
    return EmbeddedBatch(new_BD, torch.tensor(LABELS), draw(len(LABELS), OLD_DIM, seed=2).requires_grad_())


def naive_logit(z: list[float], row: list[float], bias: float, logits: str) -> float:
    inner = sum(a * b for a, b in zip(z, row, strict=True))
    if logits != "cosine":
        return inner / (math.hypot(*z) if logits in {"unit", "head"} else 1) + bias
    return SCALE * inner / math.hypot(*z) / math.hypot(*row)


@pytest.mark.parametrize("logits", ["head", "raw", "cosine"])
def test_the_form_old_is_the_cross_entropy_of_known_samples_by_the_old_head(logits: str) -> None:
    old, given = old_version(), batch()
    terms = []
    for z, label in zip(given.new_BD.tolist(), LABELS, strict=True):
        row = old.label_C[label].item()
        if row == UNKNOWN:
            continue
        heads = zip(old.weight_KN.tolist(), old.bias_K.tolist(), strict=True)
        terms.append(-log_softmax([naive_logit(z, w, b, logits) for w, b in heads])[int(row)])

    made = build(influence="old", logits=logits, scale=SCALE).influence_loss(given)

    assert len(terms) == 4
    assert made.item() == pytest.approx(sum(terms) / len(terms), rel=1e-5)


@pytest.mark.parametrize("logits", ["head", "raw", "cosine"])
def test_the_form_synthesised_judges_every_sample_with_means_for_the_classes_the_head_lacks(logits: str) -> None:
    old, given = old_version(), batch()
    rows = {2: 0, 0: 1, 1: 2, 3: 3}  # the head's own rows first, then the missing classes in their order
    means = (old.mean_CN if logits == "raw" else old.centre_CN).tolist()
    weights = [*old.weight_KN.tolist(), means[1], means[3]]
    biases = [*old.bias_K.tolist(), 0.0, 0.0]
    terms = []
    for z, label in zip(given.new_BD.tolist(), LABELS, strict=True):
        values = [naive_logit(z, w, b, logits) for w, b in zip(weights, biases, strict=True)]
        terms.append(cross_entropy(values, rows[label]))

    made = build(influence="synthesised", logits=logits, scale=SCALE).influence_loss(given)

    assert made.item() == pytest.approx(sum(terms) / len(terms), rel=1e-5)


@pytest.mark.parametrize("logits", ["head", "raw", "cosine"])
def test_the_form_distill_compares_what_the_old_head_says_of_both_embeddings(logits: str) -> None:
    old, given = old_version(), batch()
    terms = []
    for new, before in zip(given.new_BD.tolist(), given.old_BN.tolist(), strict=True):
        heads = list(zip(old.weight_KN.tolist(), old.bias_K.tolist(), strict=True))
        q = log_softmax([naive_logit(new, w, b, logits) for w, b in heads])
        p = log_softmax([naive_logit(before, w, b, logits) for w, b in heads])
        terms.append(sum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True)))

    made = build(influence="distill", logits=logits, scale=SCALE).influence_loss(given)

    assert made.item() == pytest.approx(sum(terms) / len(terms), rel=1e-4)


@pytest.mark.parametrize(("classes", "expected"), [(2, 0.98), (10, 3.107), (100, 6.499), (964, 9.716)])
def test_the_scale_of_cosines_follows_from_the_number_of_classes(classes: int, expected: float) -> None:
    scale = cosine_scale(0.0, classes)
    own = math.exp(scale) / (math.exp(scale) + classes - 1)  # every other class at a right angle

    assert scale == pytest.approx(expected, abs=1e-3)
    assert own > 0.7
    assert cosine_scale(5.0, classes) == 5.0
    with pytest.raises(InvalidArgument, match="scale must be 0"):
        cosine_scale(-1.0, classes)


@pytest.mark.parametrize(("influence", "rows"), [("synthesised", CLASSES), ("old", 2), ("distill", 2)])
def test_without_a_scale_cosines_are_scaled_by_the_rows_there_are(influence: str, rows: int) -> None:
    assert build(influence=influence, logits="cosine").scale == cosine_scale(0.0, rows)


@pytest.mark.parametrize("influence", ["old", "synthesised", "distill"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_by_default_the_rows_are_the_mean_unit_old_embeddings_of_all_classes(influence: str, smoothing: float) -> None:
    old, given, terms = old_version(), batch(), []
    for new, before, label in zip(given.new_BD.tolist(), given.old_BN.tolist(), LABELS, strict=True):
        q, p = (
            log_softmax([naive_logit(z, row, 0.0, "unit") for row in old.centre_CN.tolist()]) for z in (new, before)
        )
        if influence == "distill":
            terms.append(sum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True)))
        elif influence == "synthesised" or old.label_C[label] != UNKNOWN:
            terms.append(-(1 - smoothing) * q[label] - smoothing * sum(q) / CLASSES)

    made = build(influence=influence, smoothing=smoothing).influence_loss(given)
    assert made.item() == pytest.approx(sum(terms) / len(terms), rel=1e-4)


@pytest.mark.parametrize("logits", ["unit", "raw"])
def test_alleviating_adds_the_new_heads_logits_of_other_classes_as_negatives(logits: str) -> None:
    method, given = build(logits=logits, alleviate=True), batch()
    mine = method.old_logits(given.new_BD).tolist()
    heads, terms = method.classifier.head(given.new_BD).tolist(), []
    for old, new, label in zip(mine, heads, LABELS, strict=True):
        row = int(method.get_buffer("label_C")[label])
        terms.append(cross_entropy([*old, *(x for c, x in enumerate(new) if c != label)], row))

    assert method.influence_loss(given).item() == pytest.approx(sum(terms) / len(terms), rel=1e-5)
    with pytest.raises(InvalidArgument, match="alleviate requires labels"):
        build(influence="distill", alleviate=True)


@pytest.mark.parametrize("influence", ["old", "synthesised", "distill"])
def test_the_loss_is_base_plus_weight_times_influence_and_the_old_side_never_learns(influence: str) -> None:
    method, given = build(influence=influence, weight=3.0), batch()
    step = method(given)
    step.loss.backward()

    expected = method.classifier(given.new_BD, given.label_B) + 3.0 * method.influence_loss(given)
    torch.testing.assert_close(step.loss, expected)
    assert given.new_BD.grad is not None
    assert given.old_BN.grad is None
    assert {name for name, _ in method.named_parameters()} == {"classifier.head.weight", "classifier.head.bias"}


@pytest.mark.parametrize("known", [(UNKNOWN,) * CLASSES, (1, 0, UNKNOWN, UNKNOWN), (0, 1, 2, 3)])
def test_without_an_old_head_every_class_is_synthesised_whatever_the_old_version_was_made_for(
    known: tuple[int, ...],
) -> None:
    old = old_version(known, head=False)
    method = build(old=old, influence="synthesised")

    torch.testing.assert_close(method.get_buffer("head_KN"), old.centre_CN)
    assert method.get_buffer("label_C").tolist() == [0, 1, 2, 3]
    assert method.bias_K is None


@pytest.mark.parametrize("influence", ["old", "distill"])
def test_forms_that_need_the_old_head_say_so(influence: str) -> None:
    with pytest.raises(InvalidArgument, match="influence=synthesised"):
        build(old=old_version((UNKNOWN,) * CLASSES, head=False), influence=influence, logits="head")


def test_the_form_old_refuses_an_old_head_that_knows_no_new_class() -> None:
    with pytest.raises(InvalidArgument, match="has none of the new classes"):
        build(old=old_version((UNKNOWN,) * CLASSES), influence="old")


@pytest.mark.parametrize("option", ["influence", "logits"])
def test_an_unknown_form_lists_the_legal_ones(option: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{option} must be one of .*, not 'other'"):
        build(**{option: "other"})


@pytest.mark.parametrize(("dim", "edge"), [(2, EdgeKind.ONNX), (3, EdgeKind.IDENTITY), (5, EdgeKind.TRUNCATE)])
def test_extra_dimensions_are_cut_off_and_missing_ones_filled_with_zeros(dim: int, edge: EdgeKind) -> None:
    method, given = build(dim), batch(dim)
    (gradient_BD,) = torch.autograd.grad(method.influence_loss(given), given.new_BD)

    assert method.edge_kind is edge
    assert bool((gradient_BD[:, :OLD_DIM] != 0).all())
    assert bool((gradient_BD[:, OLD_DIM:] == 0).all())


def test_the_margin_of_the_base_head_stays_out_of_the_influence_and_of_the_head_passed_on() -> None:
    context = MethodContext(OLD_DIM, CLASSES, lambda d: Classifier(ArcFace(d, CLASSES)), old_version())
    method, given = Bct(context, scale=SCALE), batch()

    torch.testing.assert_close(method.influence_loss(given), build(scale=SCALE).influence_loss(given))
    weight, bias = method.head_weights() or (None, None)
    assert weight.shape == (CLASSES, OLD_DIM)
    assert bias is None


def test_bct_needs_an_old_version() -> None:
    with pytest.raises(InvalidArgument, match="bct requires an old version: set old="):
        Bct(MethodContext(OLD_DIM, CLASSES, lambda d: Classifier(Softmax(d, CLASSES))))


@pytest.mark.parametrize("head", ["norm_softmax", "arcface"])
def test_an_old_head_of_cosines_is_read_as_it_was_trained(head: str) -> None:
    data, recipe = load_data("digits_new", "").split(classes=5), quick("digits_v1", head=head)
    classifier = Classifier(HEADS[head](recipe.dim, 5))
    backbone = build_backbone(recipe.backbone, 1, recipe.dim)
    old = Trained(recipe, backbone, build_method(recipe, 5, None), data.classes, head=classifier.weights())
    described = summarise_old(old, data)
    context = MethodContext(recipe.dim, 5, lambda dim: Classifier(Softmax(dim, 5)), described)
    z_BD = torch.randn(4, recipe.dim)

    torch.testing.assert_close(Bct(context, influence="old", logits="head").old_logits(z_BD), classifier.head(z_BD))
    for method in (Bct, Lwf):
        with pytest.raises(InvalidArgument, match=r"uses lengths, .* cosines times .*: set logits=cosine"):
            method(context, logits="raw")


def test_rows_of_classes_that_a_head_of_cosines_lacks_are_as_long_as_its_own() -> None:
    weight_KN, scale = linear_weight("norm_softmax", torch.randn(1, 3))
    means_CN = torch.randn(2, 3)
    old = OldSummary(means_CN, torch.tensor([0, UNKNOWN]), weight_KN, head_scale=scale, centre_CN=means_CN)
    context = MethodContext(3, 2, lambda dim: Classifier(Softmax(dim, 2)), old)

    rows_KN = Bct(context, influence="synthesised", logits="head").get_buffer("head_KN")
    torch.testing.assert_close(rows_KN.norm(dim=1), torch.tensor([32.0, 32.0]))
