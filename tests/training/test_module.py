import math
import warnings
from dataclasses import replace

import lightning
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from training.method import Classifier, EmbeddedBatch, MethodContext, Step
from training.methods.independent import Independent
from training.module import Training, rate_share
from training.networks.backbones import Frozen
from training.networks.heads import Softmax
from training.recipes import Recipe

RECIPE = Recipe("test", epochs=2, warmup_epochs=1, rate=0.1)


def test_the_rate_rises_in_a_line_and_falls_as_half_a_cosine() -> None:
    shares = [rate_share(step, 4, 12) for step in range(13)]

    assert shares[:4] == [0.25, 0.5, 0.75, 1.0]
    assert shares[8] == pytest.approx(0.5)
    assert shares[12] == pytest.approx(0.0)
    assert shares[4:] == [0.5 * (1 + math.cos(math.pi * i / 8)) for i in range(9)]


def test_without_warm_up_training_starts_at_the_full_rate() -> None:
    assert rate_share(0, 0, 10) == 1.0


def test_with_milestones_the_rate_falls_to_a_tenth_at_each_after_the_warm_up() -> None:
    shares = [rate_share(step, 2, 12, [4, 8]) for step in range(12)]

    assert shares == pytest.approx([0.5, 1, 1, 1, 0.1, 0.1, 0.1, 0.1, 0.01, 0.01, 0.01, 0.01])


class Recording(Independent):
    """Keeps the batches that it was given."""

    def __init__(self, context: MethodContext) -> None:
        super().__init__(context)
        self.seen: list[EmbeddedBatch] = []

    def forward(self, batch: EmbeddedBatch) -> Step:
        self.seen.append(batch)
        return super().forward(batch)


def run(method: Recording, recipe: Recipe, cached: dict[str, Tensor] | None = None, **models: Frozen) -> Training:
    module = Training(nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), method, recipe, **models)
    batches = [(torch.randn(8, 1, 4, 4), torch.arange(8) % 2, cached or {}) for _ in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice on workers and the like
        trainer = lightning.Trainer(
            max_epochs=recipe.epochs,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, DataLoader(batches, batch_size=None))
    return module


def recording() -> Recording:
    lightning.seed_everything(0, verbose=False)
    return Recording(MethodContext(3, 2, lambda dim: Classifier(Softmax(dim, 2))))


def test_the_method_sees_each_batch_through_every_model_and_how_far_training_is() -> None:
    method = recording()
    old = Frozen(nn.Sequential(nn.Flatten(), nn.Linear(16, 5)))
    run(method, RECIPE, old=old)

    assert [batch.progress for batch in method.seen] == pytest.approx([i / 6 for i in range(6)])
    assert all(batch.old_BN is not None and batch.old_BN.shape == (8, 5) for batch in method.seen)
    assert all(batch.independent_BM is None for batch in method.seen)
    assert all(batch.old_BN is not None and not batch.old_BN.requires_grad for batch in method.seen)


def test_embeddings_that_were_computed_before_are_not_computed_again() -> None:
    method, kept = recording(), torch.randn(8, 5)
    unused = Frozen(nn.Linear(1, 1))  # would fail on images
    run(method, RECIPE, {"old": kept, "independent": kept}, old=unused, independent=unused)

    assert all(batch.old_BN is not None and torch.equal(batch.old_BN, kept) for batch in method.seen)
    assert all(batch.independent_BM is not None and torch.equal(batch.independent_BM, kept) for batch in method.seen)


@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
def test_a_step_moves_the_backbone_and_the_methods_own_parameters(optimiser: str) -> None:
    method = recording()
    head = method.classifier.head.get_parameter("weight")
    before = head.detach().clone()
    module = run(method, replace(RECIPE, optimiser=optimiser))

    assert not torch.equal(head, before)
    assert not torch.allclose(method.seen[0].new_BD[0], module.backbone(torch.zeros(1, 1, 4, 4))[0])


def test_a_frozen_backbone_stays_as_it_was() -> None:
    class Fixed(Recording):
        trains_encoder = False

    lightning.seed_everything(0, verbose=False)
    method = Fixed(MethodContext(3, 2, lambda dim: Classifier(Softmax(dim, 2))))
    module = run(method, RECIPE)

    assert not any(p.requires_grad for p in module.backbone.parameters())
    assert not method.seen[0].new_BD.requires_grad
