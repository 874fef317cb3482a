"""An old version of another modality: a tiny text tower, whose embeddings of class names come as a file."""

from __future__ import annotations

import errno
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from index.edges.transform import load_transform
from index.encoders.encoder import Encoder, verify_version
from index.errors import InvalidArgument, InvalidVector, NoEncoder, RegraftError
from index.version import Card, EdgeKind, Version
from index.version_folder.folder import load_version, write_card
from staging.inputs.recipes import quick, train_weights
from training import fitting, stored_embeddings
from training import train as path
from training.data.images import Data
from training.evaluation.matrix import evaluate
from training.measurement import embed
from training.module import Training
from training.overrides import with_overrides
from training.recipes import RECIPES, Recipe, recipe_from_json
from training.sources import load_data
from training.stored_embeddings import with_file_embeddings
from training.trained import Trained

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
DIM = 12


def tower(texts: list[str]) -> np.ndarray:
    """A text encoder: pairs of neighbouring letters, projected at random."""
    projection_LD = np.random.default_rng(0).standard_normal((27 * 27, DIM))
    bags_NL = np.zeros((len(texts), 27 * 27))
    for row, text in enumerate(texts):
        for first, second in zip(f"`{text}", f"{text}`", strict=True):
            bags_NL[row, 27 * (ord(first) - 96) + ord(second) - 96] += 1
    return bags_NL @ projection_LD


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tower's folder `text`, its embeddings `e.npz`, and an independent image version."""
    place = tmp_path_factory.mktemp("text")
    (place / "text").mkdir()
    write_card(place / "text", Card("text", DIM, {"kind": "cosine"}, method="letters"))
    np.savez(place / "e.npz", classes=np.arange(10), embeddings=tower(list(NAMES)))
    train_weights(quick("digits_independent", epochs=3), place / "independent")
    return place


def against_text(place: Path, name: str, **changes: object) -> Recipe:
    given = {"old": str(place / "text"), "old_embeddings": str(place / "e.npz"), "dim": DIM, **changes}
    return quick(name, epochs=1, **given)


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """The batches that training steps were given so far."""
    seen, step = [], Training.training_step

    def watched(module: Training, drawn: tuple, number: int) -> object:
        seen.append(drawn)
        return step(module, drawn, number)

    monkeypatch.setattr(Training, "training_step", watched)
    return seen


@pytest.mark.slow
def test_bt2_makes_an_image_model_that_searches_what_a_text_tower_stored(place: Path, tmp_path: Path) -> None:
    recipe = against_text(place, "digits_bt2", dim=DIM + 16, independent=str(place / "independent"))
    out = path.train(replace(recipe, epochs=8, batch_size=64), tmp_path / "v2", progress=False)
    old, new, data = load_version(place / "text"), load_version(out), load_data("digits_new", "")
    (edge,) = new.edges
    verify_version(out, {"text": old.card})
    asked = load_transform(edge, new.card, old.card)(Encoder(new).encode(data.query.images).vectors)
    # What the old version stored: one embedding of a name for each item.
    nearest = np.argmax(asked @ tower(list(NAMES)).T / np.linalg.norm(tower(list(NAMES)), axis=1), axis=1)

    assert (edge.kind, edge.old, edge.old_encoder) == (EdgeKind.TRUNCATE, "text", "")
    assert np.mean(nearest == data.query.labels) == pytest.approx(edge.scores["cmc@1"].value, abs=1.01 / 320)
    assert edge.scores["cmc@1"].value > 0.8
    assert edge.calibration is not None
    assert set(new.card.metrics) == {"old/old", "new/old", "new/new"}

    measured = evaluate([old, new], load_data("digits_new", "", stored=(place / "e.npz", old)), points=2)
    assert measured.cells["v2", "text"].retrieval.cmc(1) == pytest.approx(edge.scores["cmc@1"].value, abs=1.01 / 320)
    with pytest.raises(NoEncoder, match="'text' cannot embed images"):
        evaluate([old, new], data)


@pytest.mark.usefixtures("weights_only")
@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("l2", {}),
        ("bct", {}),
        ("oca", {"dim": DIM + 8}),
        ("advbct", {}),
        ("fct", {"dim": 16, "options": {"branch": 8, "trunk": 8}}),
    ],
)
def test_methods_that_need_no_more_than_old_embeddings_learn_from_text(
    method: str, changes: dict[str, object], place: Path, tmp_path: Path
) -> None:
    changes |= {"independent": str(place / "independent")} if method == "fct" else {}
    made = load_version(path.train(against_text(place, f"digits_{method}", **changes), tmp_path / "v2", False))

    assert made.card.recipe["old_embeddings"] == str(place / "e.npz")
    assert made.card.metrics["new/old"]["cmc@1"]["value"] >= 0
    assert Trained.load(made.folder).old_dim == DIM


@pytest.mark.usefixtures("weights_only")
def test_every_batch_goes_with_the_embeddings_of_its_own_classes(
    place: Path, tmp_path: Path, batches: list[tuple]
) -> None:
    path.train(against_text(place, "digits_l2", split_seed=1, fraction=0.5), tmp_path / "v2", False)
    unit_KN = tower(list(NAMES)) / np.linalg.norm(tower(list(NAMES)), axis=1, keepdims=True)

    assert batches
    for _, label_B, cached in batches:
        np.testing.assert_allclose(cached["old"], unit_KN[label_B], atol=1e-6)


@pytest.mark.parametrize(
    ("method", "options"),
    [("lwf", {}), ("bct", {"influence": "old", "logits": "head"}), ("bct", {"influence": "distill", "logits": "head"})],
)
def test_methods_that_need_the_old_classifier_say_so(
    method: str, options: dict[str, object], place: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgument, match="requires the old version's classifier"):
        path.train(against_text(place, f"digits_{method}", options=options), tmp_path / "v2", False)
    assert list(tmp_path.iterdir()) == []


def test_embeddings_may_be_given_for_each_image_and_stay_with_it_through_every_split(place: Path) -> None:
    version, plain = load_version(place / "text"), load_data("digits_new", "")
    sets = {"train": plain.train, "query": plain.query, "gallery": plain.gallery}
    drawn = {part: np.random.default_rng(7).standard_normal((len(s), DIM)) for part, s in sets.items()}
    np.savez(place / "images.npz", **drawn)
    data = with_file_embeddings(plain, place / "images.npz", version).split(classes=4, fraction=0.3, seed=2)
    unit = drawn["train"] / np.linalg.norm(drawn["train"], axis=1, keepdims=True)
    before = [plain.train.images.content(row) for row in range(len(plain.train))]
    kept = [before.index(data.train.images.content(row)) for row in range(len(data.train))]

    assert data.stored == "text"
    assert data.train.stored is not None
    assert data.gallery.stored is not None
    np.testing.assert_allclose(data.train.stored, unit[kept], atol=1e-6)
    np.testing.assert_allclose(
        data.gallery.stored * np.linalg.norm(drawn["gallery"], axis=1, keepdims=True), drawn["gallery"], atol=1e-5
    )


def test_where_both_sides_are_one_list_one_set_of_embeddings_does(place: Path) -> None:
    plain = load_data("digits_new", "")
    np.savez(place / "same.npz", train=np.ones((900, DIM)), query=np.ones((320, DIM)))
    same = with_file_embeddings(
        replace(plain, gallery=plain.query, same=True), place / "same.npz", load_version(place / "text")
    )

    assert same.gallery is same.query
    with pytest.raises(InvalidArgument, match="has no embeddings for the 577 gallery images"):
        with_file_embeddings(plain, place / "same.npz", load_version(place / "text"))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"classes": np.arange(8), "embeddings": np.ones((8, DIM))}, "has no embedding of 2 classes: 8, 9"),
        ({"classes": np.arange(10), "embeddings": np.ones((9, DIM))}, "one embedding for each class, not 9 for 10"),
        ({"classes": np.zeros(10), "embeddings": np.ones((10, DIM))}, "one embedding for each class, not 10 for 1"),
        ({"classes": np.arange(10), "embeddings": np.ones((10, 3))}, "e.npz, embeddings: an embedding must have 12"),
        ({"classes": np.arange(10), "embeddings": np.zeros((10, DIM))}, "e.npz, embeddings/0: an all-zero"),
        ({"classes": np.arange(10), "embeddings": np.full((10, DIM), np.nan)}, "e.npz, embeddings/0: .* finite"),
        ({"classes": np.array([b"a", b"b"]), "embeddings": np.ones((2, DIM))}, "0, 1, 2, 3, 4, ...; it names a, b"),
        ({"train": np.full((3, DIM), np.nan), "query": np.ones((3, DIM))}, "e.npz, train/0: .* finite"),
        (
            {name: np.ones((3, DIM)) for name in ("train", "query", "classes", "embeddings")},
            "holds train, query, classes, embeddings, not classes and embeddings or train",
        ),
        ({"train": np.ones((3, DIM)), "query": np.ones((3, DIM))}, "has 3 embeddings for the 900 train images"),
        ({"old": np.ones((3, DIM))}, "holds old, not classes and embeddings or train and query and gallery"),
        (None, "cannot be used"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_with_what_is_missing(
    arrays: dict[str, np.ndarray] | None, message: str, place: Path, tmp_path: Path
) -> None:
    (tmp_path / "e.npz").write_bytes(b"no numbers")
    if arrays is not None:
        np.savez(tmp_path / "e.npz", **arrays)

    with pytest.raises((InvalidArgument, InvalidVector), match=message):
        path.train(against_text(place, "digits_bct", old_embeddings=str(tmp_path / "e.npz")), tmp_path / "v2", False)
    assert [p.name for p in tmp_path.iterdir()] == ["e.npz"]


def test_one_array_is_told_from_a_file_of_arrays(place: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "e.npy", np.ones((10, DIM)))

    with pytest.raises(InvalidArgument, match=r"e\.npy cannot be used: it is an \.npy of one array, not an \.npz"):
        with_file_embeddings(load_data("digits_new", ""), tmp_path / "e.npy", load_version(place / "text"))


def folder(place: Path, name: str, **fields: object) -> str:
    (place / name).mkdir()
    write_card(place / name, Card(**{"name": name, "dim": DIM, "space": {"kind": "cosine"}, **fields}))
    return str(place / name)


def test_an_old_version_that_cannot_go_with_a_file_is_refused(place: Path, tmp_path: Path) -> None:
    wide = folder(tmp_path, "wide", space={"kind": "lorentz", "curvature": 2.0})
    sided = folder(tmp_path, "sided", side_dim=3)
    for old, message in {
        "": "old_embeddings requires their version",
        str(tmp_path / "nowhere"): "old_embeddings requires their version",
        str(place / "independent"): "embeds images itself",
        wide: "curvature 1",
        sided: "has side-information",
    }.items():
        with pytest.raises(RegraftError, match=message):
            path.train(against_text(place, "digits_bct", old=old), tmp_path / "v2", False)


def test_a_text_version_alone_says_that_it_needs_a_file(place: Path, tmp_path: Path) -> None:
    with pytest.raises(RegraftError, match="old_embeddings=FILE"):
        path.train(against_text(place, "digits_bct", old_embeddings=""), tmp_path / "v2", False)


@pytest.mark.usefixtures("weights_only")
def test_other_embeddings_are_another_training(place: Path) -> None:
    version = load_version(place / "text")
    np.savez(place / "other.npz", classes=np.arange(10), embeddings=-tower(list(NAMES)))
    module = type("Module", (), {"recipe": RECIPES["digits_l2"](), "frozen_models": {}})()
    one, other = (
        fitting.identity(module, load_data("digits_new", "", stored=(place / name, version)), None)
        for name in ("e.npz", "other.npz")
    )

    assert fitting.changes(one, other) == "images"


def test_cards_from_before_there_was_such_a_file_still_equal_their_recipes() -> None:
    recipe = RECIPES["digits_bct"]()

    assert "old_embeddings" not in recipe.as_json()
    assert recipe_from_json(recipe.as_json()) == replace(recipe, summary="")
    assert recipe_from_json(replace(recipe, old_embeddings="e.npz").as_json()).old_embeddings == "e.npz"


def test_the_command_evaluates_with_the_file_that_was_trained_with(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from regraft.commands.train import _stored

    version = load_version(place / "text")
    trained: Version = replace(version, card=replace(version.card, name="v2", files={"encoder.onnx": "0" * 64}))
    trained = replace(trained, card=replace(trained.card, recipe={"old_embeddings": "kept.npz"}), edges=())

    assert _stored(None, [trained]) is None
    assert _stored(None, [version]) is None
    assert _stored(None, [version, trained]) == (Path("kept.npz"), version)
    assert _stored(Path("e.npz"), [version, trained]) == (Path("e.npz"), version)
    with pytest.raises(InvalidArgument, match="not 0"):
        _stored(Path("e.npz"), [trained])


@pytest.mark.usefixtures("weights_only")
def test_an_old_version_without_weights_is_asked_by_its_encoder_once(
    v1: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(v1, tmp_path / "v1")
    (tmp_path / "v1" / "weights.safetensors").unlink()
    write_card(tmp_path / "v1", replace(load_version(v1).card, method="elsewhere", recipe={}))
    monkeypatch.setattr(stored_embeddings, "EMBEDDING_CACHE", tmp_path / "kept")
    asked, encode = [], Encoder.encode

    def counted(encoder: Encoder, images: list) -> object:
        asked.append(len(images))
        return encode(encoder, images)

    monkeypatch.setattr(Encoder, "encode", counted)
    known, foreign = (
        load_version(path.train(quick("digits_l2", old=str(folder), epochs=1), tmp_path / f"{name}-v2", False))
        for name, folder in (("known", v1), ("foreign", tmp_path / "v1"))
    )
    assert sum(asked) == 900 + 320 + 577
    path.train(quick("digits_oca", old=str(tmp_path / "v1"), epochs=1), tmp_path / "third", False)

    assert sum(asked) == 900 + 320 + 577  # kept
    scores = [version.card.metrics["old/old"]["cmc@1"]["value"] for version in (known, foreign)]
    assert scores[0] == pytest.approx(scores[1], abs=1.01 / 320)
    assert foreign.card.metrics["new/old"]["cmc@1"]["value"] > 0


@pytest.mark.usefixtures("weights_only")
def test_an_old_version_sees_images_as_it_was_made_to_whatever_the_new_one_sees(
    v1: Path, tmp_path: Path, batches: list[tuple]
) -> None:
    larger = with_overrides(
        quick("digits_l2", old=str(v1), epochs=1),
        ["preprocess.height=16", "preprocess.width=16", "preprocess.resize=16"],
    )
    made = load_version(path.train(larger, tmp_path / "v2", False))
    image_BCHW, _, cached = batches[0]
    everything = embed(Trained.load(v1), load_data("digits_new", "").train)

    assert image_BCHW.shape[-2:] == (16, 16)
    own_BN = torch.nn.functional.normalize(cached["old"])
    assert float((own_BN @ torch.from_numpy(everything).T).amax(1).min()) == pytest.approx(1, abs=1e-5)
    assert made.card.recipe["preprocess"]["height"] == 16
    assert made.card.metrics["old/old"] == load_version(v1).card.metrics["new/new"]


def test_what_an_encoder_said_is_not_kept_for_another_way_to_see_images(
    v1: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_embeddings, "EMBEDDING_CACHE", tmp_path)
    version, images = load_version(v1), load_data("digits_new", "").query.take(np.arange(5))
    data = Data(images, images, images, same=True)
    preprocess = version.card.preprocess
    assert preprocess is not None
    darker = replace(version, card=replace(version.card, preprocess=replace(preprocess, mean=(0.9,))))
    monkeypatch.setattr(Encoder, "_run_probe", lambda *_: None)
    first, other, again = (
        stored_embeddings.with_encoder_embeddings(data, one).train.stored for one in (version, darker, version)
    )

    assert not np.array_equal(first, other)
    assert np.array_equal(first, again)


@pytest.fixture
def few(v1: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Data, Version]:
    """Five images and a version whose embeddings of them are kept below `tmp_path`."""
    monkeypatch.setattr(stored_embeddings, "EMBEDDING_CACHE", tmp_path / "kept")
    images = load_data("digits_new", "").query.take(np.arange(5))
    return Data(images, images, images, same=True), load_version(v1)


@pytest.mark.parametrize("left", [0, 100, 200])
def test_damaged_embeddings_in_the_cache_are_made_again(few: tuple[Data, Version], tmp_path: Path, left: int) -> None:
    first = stored_embeddings.with_encoder_embeddings(*few).train.stored
    (kept,) = (tmp_path / "kept").iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(whole[:left])

    again = stored_embeddings.with_encoder_embeddings(*few).train.stored
    assert np.array_equal(first, again)
    assert kept.read_bytes() == whole


def test_a_cache_that_cannot_be_written_stops_no_training(
    few: tuple[Data, Version], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(file: object, array: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("numpy.save", full)

    assert len(stored_embeddings.with_encoder_embeddings(*few).train.stored) == 5
    assert "could not be written: No space left on device" in caplog.text
    assert list((tmp_path / "kept").iterdir()) == []
