"""The heads against naive loops, pytorch-metric-learning and points whose logits can be read off a circle."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import Tensor, nn

from tensors import circle, draw64
from training.networks.heads import HEADS, ArcFace, CosFace, LorentzMLR, NormSoftmax, Softmax
from training.networks.orthogonal import Orthogonal


def with_weight(head: nn.Module, weight: Tensor) -> nn.Module:
    head.to(weight.dtype).get_parameter("weight").data.copy_(weight)
    return head


def naive_margin_logits(z: Tensor, weight: Tensor, label: Tensor, kind: str, scale: float, margin: float) -> Tensor:
    rows = []
    for i in range(len(z)):
        row = []
        for c in range(len(weight)):
            cosine = float(z[i] @ weight[c]) / math.sqrt(float(z[i] @ z[i]) * float(weight[c] @ weight[c]))
            if c == int(label[i]) and kind == "cosface":
                cosine -= margin
            elif c == int(label[i]) and kind == "arcface":
                angle = math.acos(cosine)
                cosine = math.cos(angle + margin) if angle <= math.pi - margin else cosine - margin * math.sin(margin)
            row.append(scale * cosine)
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize(
    ("kind", "head", "scale", "margin"),
    [
        ("norm_softmax", NormSoftmax(5, 4), 32.0, 0.0),
        ("cosface", CosFace(5, 4), 32.0, 0.4),
        ("arcface", ArcFace(5, 4), 64.0, 0.5),
    ],
)
def test_cosine_heads_equal_naive_loops(kind: str, head: nn.Module, scale: float, margin: float) -> None:
    z, weight, label = draw64(40, 5), draw64(4, 5, seed=1), torch.arange(40) % 4
    with_weight(head, weight)

    torch.testing.assert_close(head(z, label), naive_margin_logits(z, weight, label, kind, scale, margin))
    torch.testing.assert_close(head(z), naive_margin_logits(z, weight, label, "none", scale, margin))


@pytest.mark.parametrize("kind", ["cosface", "arcface", "norm_softmax"])
def test_cosine_heads_agree_with_pytorch_metric_learning(kind: str) -> None:
    pml = pytest.importorskip("pytorch_metric_learning.losses")
    reference, head = {
        "cosface": (pml.CosFaceLoss(6, 8, margin=0.4, scale=32), CosFace(8, 6)),
        "arcface": (pml.ArcFaceLoss(6, 8, margin=math.degrees(0.5), scale=64), ArcFace(8, 6)),
        "norm_softmax": (pml.NormalizedSoftmaxLoss(6, 8, temperature=1 / 32), NormSoftmax(8, 6)),
    }[kind]
    z, label = draw64(50, 8).float(), torch.arange(50) % 6
    with_weight(head, reference.W.detach().T)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = reference(z, label)

    torch.testing.assert_close(nn.functional.cross_entropy(head(z, label), label), expected, rtol=1e-4, atol=1e-4)


def test_margins_on_a_circle() -> None:
    weight, z, label = circle(0, 90), circle(60), torch.tensor([0])

    assert with_weight(CosFace(2, 2), weight)(z, label)[0].tolist() == pytest.approx(
        [32 * (0.5 - 0.4), 32 * math.cos(math.radians(30))]
    )
    assert with_weight(ArcFace(2, 2), weight)(z, label)[0].tolist() == pytest.approx(
        [64 * math.cos(math.radians(60) + 0.5), 64 * math.cos(math.radians(30))]
    )


def test_the_arcface_logit_falls_with_the_angle_all_the_way_to_180_degrees() -> None:
    z = circle(*range(0, 181, 2))
    own = with_weight(ArcFace(2, 1), circle(0))(z, torch.zeros(len(z), dtype=torch.int64))[:, 0]

    assert bool((own.diff() < 0).all())


def test_arcface_has_a_finite_gradient_on_its_own_weight_vector() -> None:
    head = with_weight(ArcFace(2, 2), circle(0, 90))
    z = circle(0).requires_grad_()
    head(z, torch.tensor([0])).sum().backward()

    assert bool(z.grad.isfinite().all())


def test_softmax_is_a_linear_layer_with_bias() -> None:
    head = Softmax(3, 2).double()
    z = draw64(4, 3)

    torch.testing.assert_close(head(z, torch.tensor([0, 1, 0, 1])), z @ head.weight.T + head.bias)


def test_the_lorentz_head_reads_tangent_lengths_at_offset_zero() -> None:
    head = with_weight(LorentzMLR(2, 2), torch.tensor([[1.0, 0.0], [0.0, 3.0]], dtype=torch.float64))
    x = torch.tensor([[math.sinh(2.0), 0.0]], dtype=torch.float64)

    assert head(x)[0].tolist() == pytest.approx([2.0, 0.0])


@pytest.mark.parametrize("name", HEADS)
def test_every_head_learns_to_separate_three_directions(name: str) -> None:
    torch.manual_seed(0)
    head = HEADS[name](2, 3)
    z = circle(0, 20, 120, 140, 240, 260).float()
    label = torch.tensor([0, 0, 1, 1, 2, 2])
    optimiser = torch.optim.Adam(head.parameters(), lr=0.1)
    for _ in range(200):
        optimiser.zero_grad()
        nn.functional.cross_entropy(head(z, label), label).backward()
        optimiser.step()

    assert head(z).argmax(1).tolist() == label.tolist()


@pytest.mark.parametrize("name", ["norm_softmax", "cosface", "arcface", "lorentz_mlr"])
def test_sensitive_heads_compute_in_float32_under_autocast(name: str) -> None:
    torch.manual_seed(0)
    head, z, label = HEADS[name](8, 3), draw64(4, 8).float(), torch.tensor([0, 1, 2, 0])
    expected = head(z, label)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(head(z, label), expected)


def test_the_orthogonal_layer_starts_as_the_identity_and_stays_orthogonal_when_trained_hard() -> None:
    torch.manual_seed(0)
    layer, x, y = Orthogonal(24), torch.randn(64, 24), torch.randn(64, 24)
    assert torch.equal(layer(x), x)
    optimiser = torch.optim.Adam(layer.parameters(), lr=0.3)
    losses = []
    for _ in range(60):
        optimiser.zero_grad()
        loss = nn.functional.mse_loss(layer(x), y)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    matrix = layer.matrix().detach()

    assert min(losses) < losses[0]
    assert float((matrix @ matrix.T - torch.eye(24)).abs().max()) < 1e-5
    assert float(torch.linalg.det(matrix.double())) == pytest.approx(1.0)
    torch.testing.assert_close(layer(x).norm(dim=1), x.norm(dim=1))


def test_the_orthogonal_layer_keeps_its_residual_however_far_it_moves() -> None:
    layer = Orthogonal(160)
    nn.init.normal_(layer.upper, std=5.0)
    matrix = layer.matrix().detach()

    assert float((matrix @ matrix.T - torch.eye(160)).abs().max()) < 1e-5


def test_a_random_orthogonal_layer_starts_as_a_rotation_of_its_own_and_weight_decay_leaves_it_there() -> None:
    layer, other = Orthogonal(24, random=True), Orthogonal(24, random=True)
    start = layer.matrix().detach()
    layer.upper.grad = torch.zeros_like(layer.upper)
    optimiser = torch.optim.SGD(layer.parameters(), lr=1.0, weight_decay=0.5)
    for _ in range(3):
        optimiser.step()
    resumed = Orthogonal(24, random=True)
    resumed.load_state_dict(layer.state_dict())

    assert float(torch.linalg.det(start.double())) == pytest.approx(1.0, abs=1e-5)
    assert float((start @ start.T - torch.eye(24)).abs().max()) < 1e-6
    assert not torch.allclose(start, other.matrix(), atol=0.1)
    assert torch.equal(layer.matrix(), start)
    assert torch.equal(resumed.matrix(), start)


def test_the_orthogonal_layer_is_the_rotation_by_its_only_angle_in_two_dimensions() -> None:
    layer = Orthogonal(2).double()
    layer.upper.data[0, 1] = -math.radians(30)

    torch.testing.assert_close(layer(circle(45)), circle(75))
