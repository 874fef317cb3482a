"""OCA: its three terms against naive loops, the orthogonal layer, and the head it passes on."""

from __future__ import annotations

import math

import pytest
import torch

from index.errors import InvalidArgument
from index.version import EdgeKind
from naive import cross_entropy
from tensors import draw
from training.losses.losses import UNKNOWN
from training.method import Classifier, EmbeddedBatch, MethodContext, OldSummary
from training.methods.compatible import cosine_scale
from training.methods.oca import Oca
from training.networks.heads import Softmax

CLASSES, OLD_DIM, DIM = 4, 3, 5
LABELS = [0, 1, 2, 3, 0, 2]


MEANS, CENTRES = draw(CLASSES, OLD_DIM, seed=5), draw(CLASSES, OLD_DIM, seed=6)


def build(dim: int = DIM, smoothing: float = 0.0, **options: object) -> Oca:
    torch.manual_seed(0)
    old = OldSummary(MEANS, torch.full((CLASSES,), UNKNOWN), centre_CN=CENTRES)
    made = Oca(MethodContext(dim, CLASSES, lambda d: Classifier(Softmax(d, CLASSES), smoothing), old), **options)
    assert not torch.equal(made.rotation.matrix(), torch.eye(dim))  # a random start
    with torch.no_grad():
        made.rotation.upper.copy_(draw(dim, dim, seed=9))
    return made


def batch() -> EmbeddedBatch:
    return EmbeddedBatch(draw(len(LABELS), DIM, seed=1).requires_grad_(), torch.tensor(LABELS))


def smoothed(logits: list[float], label: int, smoothing: float) -> float:
    everyone = sum(cross_entropy(logits, c) for c in range(CLASSES)) / CLASSES
    return (1 - smoothing) * cross_entropy(logits, label) + smoothing * everyone


@pytest.mark.parametrize("form", ["unit", "raw", "cosine"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_its_three_terms_with_the_sign_that_aligns(form: str, smoothing: float) -> None:
    a, b = (10.0, 5.0) if form == "raw" else (2.0, 1.0)  # of the paper, and of its code: the defaults
    letter = {"influence_weight": a, "alignment_weight": b} if form == "raw" else {}
    method, given = build(smoothing=smoothing, logits=form, scale=5.0, **letter), batch()
    means = (MEANS if form == "raw" else CENTRES).tolist()
    rotation = method.rotation.matrix().double().tolist()
    weight, bias = (x.double().tolist() for x in method.classifier.weights() if x is not None)
    base = influence = alignment = 0.0
    for h, label in zip(given.new_BD.tolist(), LABELS, strict=True):
        h = [x / math.hypot(*h) for x in h] if form == "unit" else h  # noqa: PLW2901
        turned = [sum(q * x for q, x in zip(row, h, strict=True)) for row in rotation]
        logits = [sum(w * x for w, x in zip(row, turned, strict=True)) + b for row, b in zip(weight, bias, strict=True)]
        inner = [sum(p * x for p, x in zip(mean, h[:OLD_DIM], strict=True)) for mean in means]
        length = math.hypot(*h[:OLD_DIM])
        cosine = [v / length / math.hypot(*mean) for v, mean in zip(inner, means, strict=True)]
        base += smoothed(logits, label, smoothing)
        influence += smoothed([5.0 * c for c in cosine] if form == "cosine" else inner, label, smoothing)
        alignment += 1 - cosine[label]

    expected = (base + a * influence + b * alignment) / len(LABELS)

    assert method(given).loss.item() == pytest.approx(expected, rel=1e-4)


def test_on_unit_vectors_both_readings_are_one() -> None:
    given = batch()
    unit = EmbeddedBatch(torch.nn.functional.normalize(given.new_BD), given.label_B)
    letter = build(logits="raw")
    letter.register_buffer("mean_CN", CENTRES)

    torch.testing.assert_close(build().forward(given).loss, letter(unit).loss)
    torch.testing.assert_close(build().forward(given).loss, build().forward(unit).loss)


def test_only_the_base_loss_reaches_the_extra_dimensions() -> None:
    method, given = build(logits="raw", influence_weight=1.0, alignment_weight=1.0), batch()
    parts = method(given).logging
    gradients = {name: torch.autograd.grad(parts[name], given.new_BD, retain_graph=True)[0] for name in parts}

    assert bool((gradients["base"] != 0).all())
    for name in ("influence", "alignment"):
        assert bool((gradients[name][:, :OLD_DIM] != 0).any())
        assert bool((gradients[name][:, OLD_DIM:] == 0).all())


def test_the_layer_between_is_orthogonal_after_training_steps() -> None:
    method, given = build(), batch()
    optimiser = torch.optim.SGD(method.parameters(), lr=0.5)
    for _ in range(50):
        optimiser.zero_grad()
        method(given).loss.backward()
        optimiser.step()
    matrix = method.rotation.matrix()

    assert (matrix @ matrix.T - torch.eye(DIM)).abs().max() < 1e-5


def test_the_head_passed_on_says_of_the_stored_embedding_what_the_head_says_after_the_rotation() -> None:
    method, given = build(), batch()
    weight, bias = method.head_weights()
    assert bias is not None

    torch.testing.assert_close(
        given.new_BD @ weight.T + bias, method.classifier.head(method.rotation(given.new_BD)), atol=1e-5, rtol=1e-5
    )


def test_what_ships_is_the_plain_embedding_and_a_truncation() -> None:
    method, given = build(), batch()

    assert method.edge_kind is EdgeKind.TRUNCATE
    assert method.edge is None
    assert torch.equal(method.transform(given.new_BD), given.new_BD)


@pytest.mark.parametrize("dim", [OLD_DIM, OLD_DIM - 1])
def test_a_dimension_that_leaves_nothing_extra_is_refused(dim: int) -> None:
    with pytest.raises(InvalidArgument, match=f"above {OLD_DIM}, not {dim}"):
        build(dim)


def test_without_a_scale_cosines_are_scaled_by_the_number_of_classes() -> None:
    assert build(logits="cosine").scale == cosine_scale(0.0, CLASSES)


def test_unknown_logits_list_the_legal_ones() -> None:
    with pytest.raises(InvalidArgument, match="logits must be one of unit, cosine, raw, not 'other'"):
        build(logits="other")
