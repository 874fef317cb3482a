"""BT2 against its formulas written out row by row, its invertibility, and the dimensions that cannot work."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from index.errors import InvalidArgument
from tensors import draw64
from training.method import Classifier, EmbeddedBatch, MethodContext, OldSummary
from training.methods.bt2 import BasisTransformation, Bt2
from training.methods.compatible import cosine_scale
from training.networks.heads import Softmax

N, M, D, CLASSES = 4, 5, 2, 3


def turned(transformation: BasisTransformation) -> BasisTransformation:
    nn.init.normal_(transformation.b1.upper, generator=torch.Generator().manual_seed(3))
    nn.init.normal_(transformation.b2.upper, generator=torch.Generator().manual_seed(4))
    return transformation.double()


def old_version() -> OldSummary:
    centres = F.normalize(draw64(CLASSES, N, seed=9))
    return OldSummary(draw64(CLASSES, N, seed=8), torch.zeros(CLASSES, dtype=torch.long), centre_CN=centres)


def build(dim: int = M + N, extra: int = D, smoothing: float = 0.0, **options: float | str) -> Bt2:
    torch.manual_seed(0)

    def classifier(width: int) -> Classifier:
        return Classifier(Softmax(width, CLASSES), smoothing)

    method = Bt2(MethodContext(dim, CLASSES, classifier, old_version()), extra=extra, **options).double()
    turned(method.transform)
    return method


def batch() -> EmbeddedBatch:
    return EmbeddedBatch(
        draw64(6, M + N).requires_grad_(),
        torch.arange(6) % CLASSES,
        draw64(6, N, seed=1).requires_grad_(),
        draw64(6, M, seed=2).requires_grad_(),
    )


def naive_parts(t: BasisTransformation, row: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    f_weight, f_bias = t.f.weight.detach().numpy(), t.f.bias.detach().numpy()
    b1, b2 = t.b1.matrix().detach().numpy(), t.b2.matrix().detach().numpy()
    phi2 = f_weight @ row + f_bias
    phi2 = phi2 / np.sqrt(phi2 @ phi2)
    phi3 = row[:M] / np.sqrt(row[:M] @ row[:M])
    phi4 = 2.0 * (b1 @ phi3)
    phi5 = b2 @ np.concatenate([phi2, phi4[: N - D]])
    return phi3, phi5, np.concatenate([phi5, phi4[N - D :]])


def test_the_transformation_equals_its_formulas() -> None:
    t, phi1 = turned(BasisTransformation(N, M, D, 2.0)), draw64(7, M + N)
    made, parts = t(phi1), t.parts(phi1)

    assert made.shape == (7, M + D)
    for i in range(7):
        phi3, phi5, phi_new = naive_parts(t, phi1[i].numpy())
        np.testing.assert_allclose(parts[0][i].detach(), phi3)
        np.testing.assert_allclose(parts[1][i].detach(), phi5)
        np.testing.assert_allclose(made[i].detach(), phi_new)


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_the_new_embedding_has_length_one_plus_c_squared(scale: float) -> None:
    made = turned(BasisTransformation(N, M, D, scale))(draw64(7, M + N))

    torch.testing.assert_close(made.square().sum(1), torch.full((7,), 1 + scale**2, dtype=torch.float64))


def test_the_independent_embedding_can_be_read_back_from_the_stored_one() -> None:
    t, phi1 = turned(BasisTransformation(N, M, D, 2.0)), draw64(7, M + N)
    made = t(phi1)
    undone = made[:, :N] @ t.b2.matrix()
    phi4 = torch.cat([undone[:, D:], made[:, N:]], dim=1)

    torch.testing.assert_close(phi4 @ t.b1.matrix() / 2.0, F.normalize(phi1[:, :M]))
    torch.testing.assert_close(made @ t.inverse().T, F.normalize(phi1[:, :M]))


def test_the_exported_head_says_of_the_stored_embedding_what_the_head_says_of_phi3() -> None:
    method, phi1 = build(), draw64(7, M + N)
    weight, bias = method.head_weights()

    torch.testing.assert_close(
        F.linear(method.transform(phi1), weight, bias), method.classifier.head(F.normalize(phi1[:, :M]))
    )


def test_eval_mode_uses_the_matrices_that_training_ended_with() -> None:
    t, phi1 = turned(BasisTransformation(N, M, D, 2.0)), draw64(7, M + N)
    trained = t(phi1)
    nowhere = BasisTransformation(N, M, D, 2.0).double().eval()
    nowhere.load_state_dict(t.eval().state_dict())

    torch.testing.assert_close(t(phi1), trained)
    torch.testing.assert_close(nowhere(phi1), trained)


@pytest.mark.parametrize("form", ["unit", "raw"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_is_its_four_terms(form: str, smoothing: float) -> None:
    weights = {"independent_weight": 0.5, "influence_weight": 7.0, "old_weight": 3.0}
    method, given = build(smoothing=smoothing, logits=form, **weights), batch()
    step = method(given)
    means = old_version().mean_CN if form == "raw" else old_version().centre_CN
    old_BN, independent_BM = given.old_BN.detach().numpy(), given.independent_BM.detach().numpy()
    naive = 0.0
    for i, (old, independent) in enumerate(zip(old_BN, independent_BM, strict=True)):
        phi3, phi5, _ = naive_parts(method.transform, given.new_BD[i].detach().numpy())
        unit5 = phi5 / np.sqrt(phi5 @ phi5)
        logits = means.numpy() @ unit5
        head = method.classifier.head(torch.from_numpy(phi3)[None])
        naive += F.cross_entropy(head, given.label_B[i : i + 1], label_smoothing=smoothing).item()
        naive += 0.5 * (1 - phi3 @ independent / np.linalg.norm(independent))
        wanted = (1 - smoothing) * logits[int(given.label_B[i])] + smoothing * logits.mean()
        naive += 7.0 * (np.log(np.exp(logits).sum()) - wanted)
        naive += 3.0 * (1 - unit5 @ old / np.linalg.norm(old))

    assert step.loss.item() == pytest.approx(naive / 6)


def test_cosine_logits_leave_the_length_of_the_class_means_out() -> None:
    method, given = build(logits="cosine", logit_scale=9.0), batch()
    means = old_version().centre_CN.numpy()
    means = means / np.linalg.norm(means, axis=1, keepdims=True)
    naive = 0.0
    for i in range(6):
        _, phi5, _ = naive_parts(method.transform, given.new_BD[i].detach().numpy())
        logits = 9.0 * means @ phi5 / np.sqrt(phi5 @ phi5)
        naive += np.log(np.exp(logits).sum()) - logits[int(given.label_B[i])]

    assert method(given).logging["influence"].item() == pytest.approx(naive / 6)


def test_without_a_scale_cosines_are_scaled_by_the_number_of_classes() -> None:
    assert build(logits="cosine").logit_scale == cosine_scale(0.0, CLASSES)


def test_an_unknown_kind_of_logits_lists_the_legal_ones() -> None:
    with pytest.raises(InvalidArgument, match="logits must be one of unit, cosine, raw"):
        build(logits="warm")


def test_gradients_reach_every_part_and_neither_old_nor_independent_model() -> None:
    method, given = build(), batch()
    method(given).loss.backward()

    assert given.old_BN.grad is None
    assert given.independent_BM.grad is None
    assert given.new_BD.grad is not None
    for name, parameter in method.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.any()), name


@pytest.mark.parametrize(
    ("dim", "extra", "message"),
    [
        (N + 1, 2, r"extra must be 3 to 4, not 2: n - m <= extra <= n.*n = 4 .*m = 1"),
        (N + M, 0, "extra must be 1 to 4, not 0"),
        (N + M, 5, "extra must be 1 to 4, not 5"),
        (N, 2, "dim must be the independent dimension plus the old one, so above 4, not 4"),
    ],
)
def test_a_dimension_that_cannot_work_is_refused_with_one_that_can(dim: int, extra: int, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        build(dim, extra)


@pytest.mark.parametrize(("dim", "extra"), [(N + 1, 3), (N + 1, 4), (N + 8, 1), (N + 4, 4)])
def test_every_legal_dimension_works(dim: int, extra: int) -> None:
    method = build(dim, extra)

    assert method.transform(draw64(2, dim)).shape == (2, dim - N + extra)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (0, "bt2 requires an independently trained new version: set independent="),
        (7, "dim must be the independent dimension 7 plus the old one 4, so 11, not 9"),
    ],
)
def test_the_independent_model_must_be_there_and_fit(given: int, message: str) -> None:
    context = MethodContext(
        M + N, CLASSES, lambda d: Classifier(Softmax(d, CLASSES)), old_version(), independent_dim=given
    )

    with pytest.raises(InvalidArgument, match=message):
        Bt2(context, extra=D)
    assert Bt2(replace(context, independent_dim=M), extra=D).transform.independent_dim == M
