import itertools
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch
from torch import nn

from index.errors import InvalidArgument
from staging.inputs.recipes import quick, train_weights
from training.networks.backbones import Enlarged, Frozen, build_backbone
from training.overrides import with_overrides
from training.recipes import find_recipe
from training.train import new_backbone
from training.trained import Trained


@pytest.mark.parametrize(
    "name",
    ["small_cnn", "quick_cnn_28", "small_cnn_32", "resnet18_32", "timm/test_resnet", "timm/mobilenetv3_small_050"],
)
@pytest.mark.parametrize("channels", [1, 3])
def test_a_backbone_gives_one_raw_embedding_an_image(name: str, channels: int) -> None:
    made = build_backbone(name, channels, 5).eval()

    with torch.inference_mode():
        z_BD = made(torch.randn(4, channels, 32, 32))

    assert z_BD.shape == (4, 5)
    assert not torch.allclose(z_BD.norm(dim=1), torch.ones(4))


@pytest.mark.parametrize("name", ["small_cnn", "quick_cnn_28", "slim_resnet_64"])
def test_a_small_cnn_takes_images_of_any_size(name: str) -> None:
    made = build_backbone(name, 1, 5).eval()

    assert made(torch.randn(2, 1, 8, 8)).shape == made(torch.randn(2, 1, 28, 20)).shape


def test_an_unknown_backbone_lists_the_legal_ones() -> None:
    with pytest.raises(InvalidArgument, match=r"'resnet9000' is unknown; legal: small_cnn, .*timm/"):
        build_backbone("resnet9000", 3, 5)


def test_an_unknown_timm_model_names_its_neighbours() -> None:
    with pytest.raises(InvalidArgument, match="resnet18"):
        build_backbone("timm/resnet1", 3, 5)


def test_the_stem_for_32_pixels_keeps_the_size_of_the_image() -> None:
    trunk = build_backbone("resnet18_32", 1, 5).trunk

    stem, pool = trunk.get_submodule("conv1"), trunk.get_submodule("maxpool")
    assert pool(stem(torch.zeros(1, 1, 32, 32))).shape == (1, 64, 32, 32)


def test_an_enlarged_trunk_sees_images_at_its_own_size() -> None:
    seen = Enlarged(nn.Identity(), 9)(torch.full((2, 3, 4, 6), 0.5))

    torch.testing.assert_close(seen, torch.full((2, 3, 9, 9), 0.5))


@pytest.mark.slow
def test_a_vit_trains_on_small_images() -> None:
    made = build_backbone("vit_b16_enlarged", 3, 5)

    made(torch.randn(2, 3, 32, 32)).sum().backward()
    assert made.get_parameter("trunk.trunk.patch_embed.proj.weight").grad.abs().sum() > 0


@pytest.fixture
def published(tmp_path: Path) -> tuple[timm.models.ResNet, str]:
    """A timm model with its classifier, and the file of weights that timm would publish of it."""
    model = timm.create_model("test_resnet", num_classes=1000)
    safetensors.torch.save_file(model.state_dict(), tmp_path / "model.safetensors")
    return model, str(tmp_path / "model.safetensors")


def test_pretrained_weights_are_read_from_a_file(published: tuple[timm.models.ResNet, str]) -> None:
    model, file = published
    trunk = build_backbone("timm/test_resnet", 3, 5, weights=file).trunk.state_dict()

    assert {name for name in model.state_dict() if not name.startswith("fc.")} == set(trunk)
    assert all(torch.equal(x, model.state_dict()[name]) for name, x in trunk.items())


def test_fine_tuning_a_published_backbone_on_images_of_ones_own_is_one_line(
    published: tuple[timm.models.ResNet, str],
) -> None:
    model, file = published
    line = f"root=my-photos backbone=timm/test_resnet weights={file} rate=1e-4"
    trunk = new_backbone(with_overrides(find_recipe("folders_v1"), line.split())).trunk

    assert all(torch.equal(x, model.state_dict()[key]) for key, x in trunk.state_dict().items())
    assert all(x.requires_grad for x in trunk.parameters())


def test_pretrained_weights_of_colour_images_serve_grey_ones(published: tuple[timm.models.ResNet, str]) -> None:
    model, file = published
    trunk = build_backbone("timm/test_resnet", 1, 5, weights=file).trunk
    grey = torch.randn(2, 1, 32, 32)

    with torch.inference_mode():
        torch.testing.assert_close(
            trunk.eval()(grey), model.eval().forward_head(model.forward_features(grey.expand(2, 3, 32, 32)), True)
        )


@pytest.mark.parametrize("content", [None, b"no weights"])
def test_a_file_without_such_weights_is_named(content: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    if content is not None:
        file.write_bytes(content)

    with pytest.raises(InvalidArgument, match=r"weights of test_resnet are not available from .*weights\.safetensors"):
        build_backbone("timm/test_resnet", 3, 5, weights=str(file))


def test_weights_of_another_model_are_refused(published: tuple[timm.models.ResNet, str]) -> None:
    with pytest.raises(InvalidArgument, match="weights of test_vit are not available from"):
        build_backbone("timm/test_vit", 3, 5, weights=published[1])


def test_a_download_that_fails_says_how_to_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **settings: object) -> nn.Module:
        assert settings["pretrained"]
        raise OSError("no route to host")

    monkeypatch.setattr(timm, "create_model", offline)
    with pytest.raises(InvalidArgument, match="timm's download: no route to host; set weights=FILE"):
        build_backbone("timm/resnet18", 3, 5, pretrained=True)


@pytest.mark.parametrize("name", ["small_cnn", "quick_cnn_28"])
def test_a_small_cnn_has_no_pretrained_weights(name: str) -> None:
    with pytest.raises(InvalidArgument, match="no pretrained weights"):
        build_backbone(name, 3, 5, pretrained=True)


def test_a_slim_resnet_makes_features_of_any_size_of_image_and_halves_it_block_by_block() -> None:
    made = build_backbone("slim_resnet_64", 3, 5).eval()
    sizes: list[tuple[int, ...]] = []
    for block in itertools.islice(made.trunk.children(), 6):
        block.register_forward_hook(lambda _module, _given, output: sizes.append(tuple(output.shape[1:])))

    assert made(torch.randn(2, 3, 64, 64)).shape == made(torch.randn(2, 3, 50, 97)).shape == (2, 5)
    assert sizes[:6] == [(32, 16, 16)] * 4 + [(64, 8, 8), (96, 4, 4)]


@pytest.mark.parametrize("name", ["slim_resnet_64", "small_cnn", "resnet20_32", "timm/test_resnet"])
def test_a_backbone_starts_from_the_trunk_of_a_version_and_of_no_other(name: str, tmp_path: Path) -> None:
    old, psi, place = *(build_backbone(name, 3, 5) for _ in range(2)), tmp_path / "weights.safetensors"
    held = {"raw.0.": old, "psi.backbone.": psi}
    safetensors.torch.save_file(
        {prefix + key: x.contiguous() for prefix, made in held.items() for key, x in made.state_dict().items()}, place
    )

    for given in (place, place.parent):
        new = build_backbone(name, 3, 7, weights=str(given)).trunk.state_dict()
        assert new.keys() == old.trunk.state_dict().keys()
        assert all(torch.equal(x, old.trunk.state_dict()[key]) for key, x in new.items())
    with pytest.raises(InvalidArgument, match="of another backbone"):
        build_backbone(name, 1, 7, weights=str(place))


def test_own_backbones_take_no_file_that_is_no_versions(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="cannot be read as a version's"):
        build_backbone("slim_resnet_64", 3, 7, weights=str(tmp_path / "missing"))


def test_a_frozen_model_keeps_its_statistics_whatever_its_owner_is_switched_to() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    before = {name: x.clone() for name, x in model.state_dict().items()}
    owner = nn.ModuleList([Frozen(model)]).train()
    output = owner[0](torch.randn(8, 1, 8, 8) + 5)

    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert not model[1].training
    assert not output.requires_grad
    assert [p for p in owner.parameters() if p.requires_grad] == []


def test_a_last_relu_cuts_the_embedding_off_at_zero_and_survives_its_recipe(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain, cut = (build_backbone("small_cnn", 1, 16, last_relu=flag).eval() for flag in (False, True))
    cut.load_state_dict(plain.state_dict())
    image = torch.randn(4, 1, 8, 8)
    torch.testing.assert_close(cut(image), plain(image).clamp(min=0))
    assert bool((plain(image) < 0).any())

    recipe = quick("digits_v1", last_relu=True, space="l2", epochs=1)
    made = Trained.load(train_weights(recipe, tmp_path / "v"))
    assert made.backbone.last_relu
    assert made.version.card.recipe["last_relu"] is True


def test_resnet20_has_the_size_of_its_paper() -> None:
    made = build_backbone("resnet20_32", 3, 10)

    assert sum(p.numel() for p in made.parameters()) == pytest.approx(0.27e6, rel=0.03)
    assert made(torch.randn(2, 3, 32, 32)).shape == (2, 10)
