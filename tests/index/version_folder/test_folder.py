"""index.version_folder.folder: a version folder from a stranger is read completely or refused by the field's name."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from index.errors import InvalidVersionFolder
from index.version import CARD, ENCODER, PROBE, SIDE, Card, Edge, EdgeKind, Preprocess, Score, Version
from index.version_folder.card import parse_card
from index.version_folder.folder import load_edge, load_version, sha256, write_card, write_edge

MakeVersion = Callable[..., Version]


@pytest.fixture
def old(make_version: MakeVersion, tmp_path: Path) -> Version:
    return make_version(tmp_path / "v1", "v1", 4, side_dim=2)


@pytest.fixture
def new(make_version: MakeVersion, tmp_path: Path, old: Version) -> Version:
    return make_version(tmp_path / "v2", "v2", 6, side_dim=3, edges=[(old, "matrix", 0.7)])


def change_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def change_card(version: Version, change: Callable[[dict[str, Any]], Any]) -> Path:
    change_json(version.folder / CARD, change)
    return version.folder


def change_edge(version: Version, change: Callable[[dict[str, Any]], Any]) -> Path:
    """Change edges/v1/edge.json and list its new hash in the card, so that only its content is at fault."""
    path = version.folder / "edges/v1/edge.json"
    change_json(path, change)
    return change_card(version, lambda card: card["files"].update({"edges/v1/edge.json": sha256(path)}))


def refused(folder: Path, message: str, pointer: str | None = None) -> None:
    with pytest.raises(InvalidVersionFolder, match=message) as caught:
        load_version(folder)
    if pointer is not None:
        assert caught.value.pointer == pointer


def test_a_version_comes_back_as_it_was_written(old: Version, new: Version) -> None:
    assert (new.name, new.card.dim, new.card.side_dim) == ("v2", 6, 3)
    assert set(new.card.files) == {ENCODER, SIDE, PROBE, "edges/v1/edge.json", "edges/v1/edge.npz"}
    (edge,) = new.edges
    assert (edge.new, edge.old, edge.kind) == ("v2", "v1", EdgeKind.MATRIX)
    assert edge.scores["cmc@1"].value == 0.7
    assert edge.old_encoder == old.card.encoder == sha256(old.folder / ENCODER)
    assert edge.folder == new.folder / "edges/v1"
    assert parse_card(new.card.as_json()) == new.card


def test_writing_again_changes_nothing(new: Version) -> None:
    before = (new.folder / CARD).read_bytes()
    assert write_card(new.folder, new.card) == new.card
    assert (new.folder / CARD).read_bytes() == before


def test_a_minimal_card_gets_the_documented_defaults(tmp_path: Path) -> None:
    (tmp_path / CARD).write_text('{"format": 1, "name": "v", "dim": 3, "space": {"kind": "l2"}}')
    version = load_version(tmp_path)
    assert version.card == Card("v", 3, {"kind": "l2"})
    assert version.edges == ()


@pytest.mark.parametrize("name", [ENCODER, SIDE, PROBE, "edges/v1/edge.json", "edges/v1/edge.npz"])
def test_a_missing_file_is_named(new: Version, name: str) -> None:
    (new.folder / name).unlink()
    refused(new.folder, f"{name} is listed in card.json but missing", f"/{name}")


@pytest.mark.parametrize("name", [ENCODER, "edges/v1/edge.json"])
def test_a_changed_file_is_named(new: Version, name: str) -> None:
    content = bytearray((new.folder / name).read_bytes())
    content[-2] ^= 1
    (new.folder / name).write_bytes(bytes(content))
    refused(new.folder, f"{name} does not have the sha256", f"/{name}")


def test_a_stray_file_is_named(new: Version) -> None:
    (new.folder / "edges" / "notes.txt").write_text("hello")
    refused(new.folder, r"edges/notes\.txt is not listed in card\.json", "/edges/notes.txt")


def test_a_single_edge_is_read_and_a_stray_file_beside_it_is_named(new: Version) -> None:
    place = new.folder / "edges" / "v1"
    assert load_edge(place, "v2", "v1").key == new.edges[0].key
    (place / "notes.txt").write_text("hello")

    with pytest.raises(InvalidVersionFolder, match=r"notes\.txt is not part of an edge of kind matrix") as refusal:
        load_edge(place, "v2", "v1")
    assert refusal.value.pointer == "/notes.txt"


def test_a_folder_without_a_card_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, r"card\.json is missing", "/card.json")
    refused(tmp_path / "nowhere", r"card\.json is missing")


@pytest.mark.parametrize("name", [CARD, ENCODER, "edges/v1/edge.json", "edges/v1", "edges", "stray"])
def test_a_link_is_refused_wherever_it_is(new: Version, tmp_path: Path, name: str) -> None:
    """Also one whose target is right: what is verified must be what is read later."""
    place = new.folder / name
    if place.exists():
        place.rename(tmp_path / "moved")
    else:
        (tmp_path / "moved").mkdir()
    place.symlink_to(tmp_path / "moved")
    refused(new.folder, "is a link|is not listed")


def test_a_pipe_is_no_file(new: Version) -> None:
    (new.folder / PROBE).unlink()
    os.mkfifo(new.folder / PROBE)
    refused(new.folder, "probe.npz is listed in card.json but missing")


@pytest.mark.parametrize(
    "path",
    ["../v1/encoder.onnx", "/etc/passwd", "a/../../b", "..", "", "C:/x", "a\\..\\b", "a\0b", "\ud800", "x" * 5000, "ü"],
)
def test_a_listed_path_never_leaves_the_folder(new: Version, path: str) -> None:
    folder = change_card(new, lambda card: card["files"].update({path: "0" * 64}))
    refused(folder, "would lie outside the version folder|printable ASCII|surrogate")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(colour="red"), "card.json: colour is not a field of this release"),
        (lambda c: c.pop("name"), "card.json: name is missing"),
        (lambda c: c.update(format=2), "format must be 1"),
        (lambda c: c.update(format=True), "format must be of type int"),
        (lambda c: c.update(name="../v"), "name must be 1 to 64"),
        (lambda c: c.update(dim=0), "dim must be 1 to 65536"),
        (lambda c: c.update(dim="6"), "dim must be of type int"),
        (lambda c: c.update(dim=6.0), "dim must be of type int"),
        (lambda c: c.update(side_dim=-1), "side_dim must be 0 to"),
        (lambda c: c.update(side_dim=0), "side_dim must be above 0 if and only if side.onnx"),
        (lambda c: c.update(space="cosine"), "space must be of type dict"),
        (lambda c: c.update(files=[]), "files must be of type dict"),
        (lambda c: c["files"].update({PROBE: "abc"}), "files/probe.npz must be a sha256"),
        (lambda c: c["files"].update({PROBE: None}), "files/probe.npz must be a sha256"),
        (lambda c: c.pop("preprocess"), "preprocess is required with encoder.onnx"),
        (lambda c: c.update(preprocess=[8, 8]), "preprocess must be of type dict"),
        (lambda c: c["preprocess"].pop("height"), "preprocess/height is missing"),
        (lambda c: c["preprocess"].update(height=0), "preprocess/height must be 1 to 4096 pixels"),
        (lambda c: c["preprocess"].update(resize=5000), "preprocess/resize must be 1 to 4096 pixels"),
        (lambda c: c["preprocess"].update(resize=[8, 5000]), "preprocess/resize must be 1 to 4096 pixels"),
        (lambda c: c["preprocess"].update(resize=[8]), "preprocess/resize must be a whole number of pixels, or a list"),
        (lambda c: c["preprocess"].update(crop="up"), "preprocess/crop must be one of round, floor"),
        (lambda c: c.update(prompts={"passage": "x"}), "prompts must hold texts by query and item"),
        (lambda c: c.update(prompts={"query": 1}), "prompts must hold texts by query and item"),
        (lambda c: c.update(prompts={"query": "x" * 1001}), "prompts must be texts of at most 1000 characters"),
        (lambda c: c["preprocess"].update(mode="CMYK"), "preprocess/mode must be one of L, RGB"),
        (lambda c: c["preprocess"].update(interpolation="box"), "preprocess/interpolation must be one of nearest"),
        (lambda c: c["preprocess"].update(mean=[0, 0]), "preprocess/mean must be 1 numbers"),
        (lambda c: c["preprocess"].update(mean=["0"]), "preprocess/mean must be 1 numbers"),
        (lambda c: c["preprocess"].update(std=[0]), "preprocess/std must be above 0"),
        (lambda c: c["preprocess"].update(trim=8), "preprocess/trim is not a field"),
    ],
)
def test_each_field_of_a_card_is_checked(new: Version, change: Callable[[dict[str, Any]], Any], message: str) -> None:
    refused(change_card(new, change), message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: e.pop("kind"), "edges/v1/edge.json: kind is missing"),
        (lambda e: e.update(kind="magic"), "kind must be one of identity, truncate, zero_pad, matrix, onnx"),
        (lambda e: e.update(kind="dual"), "kind must be one of"),
        (lambda e: e.update(direction="item"), "direction must be 'query' for kind matrix"),
        (lambda e: e.update(kind="onnx"), "edges/v1/edge.onnx is missing: kind onnx needs it"),
        (lambda e: e.update(scores={"cmc@1": 0.7}), "scores/cmc@1 must hold the numbers value, low and high"),
        (lambda e: e["scores"]["cmc@1"].pop("low"), "scores/cmc@1 must hold"),
        (lambda e: e["scores"]["cmc@1"].update(low=None), "scores/cmc@1 must hold"),
        (lambda e: e["scores"]["cmc@1"].update(value=10**400), "scores/cmc@1/value must be a finite number"),
        (lambda e: e.update(support=-1), "edges/v1/edge.json: support must be 0 or more"),
        (lambda e: e.update(note="x"), "edges/v1/edge.json: note is not a field"),
    ],
)
def test_each_field_of_an_edge_is_checked(new: Version, change: Callable[[dict[str, Any]], Any], message: str) -> None:
    refused(change_edge(new, change), message)


@pytest.mark.parametrize("place", ["edges/v2", "edges/bad name"])
def test_an_edge_is_named_after_another_version(new: Version, place: str) -> None:
    (new.folder / "edges/v1").rename(new.folder / place)
    write_card(new.folder, new.card)
    refused(new.folder, f"{place} must be named after another, older version")


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"\xff\xfe", b"[]", b"null", b"[" * 100_000],
)
def test_a_card_that_is_no_json_object_is_refused(new: Version, raw: bytes) -> None:
    (new.folder / CARD).write_bytes(raw)
    refused(new.folder, r"card\.json (is not valid JSON|must hold a JSON object)", "/card.json")


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        (lambda c: c.update(metrics=nested(33)), "/metrics" + "/0" * 31),
        (lambda c: c.update(method="\ud800"), "/method"),
        (lambda c: c.update(recipe={"\udfff": 1}), "/recipe"),
        (lambda c: c.update(metrics={"a": [1, 10**400]}), "/metrics/a/1"),
        (lambda c: c.update(metrics={"a": 10**5000}), "/metrics/a"),
        (lambda c: c.update(metrics={"a": float("nan")}), "/metrics/a"),
        (lambda c: c.update(metrics={"a": float("-inf")}), "/metrics/a"),
        (lambda c: c["preprocess"].update(mean=[10**400]), "/preprocess/mean/0"),
        (lambda c: c["preprocess"].update(mean=[1e300]), "/preprocess/mean"),
        (lambda c: c["preprocess"].update(std=[1e-300]), "/preprocess/std"),
        (lambda c: c.update(space={"kind": "lorentz", "curvature": 10**400}), "/space/curvature"),
        (lambda c: c.update(recipe={"notes": "x" * (1 << 20)}), "/card.json"),
    ],
)
def test_what_could_not_be_sent_back_is_refused_by_its_field(
    new: Version, change: Callable[[dict[str, Any]], Any], pointer: str
) -> None:
    old_limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        folder = change_card(new, change)
    finally:
        sys.set_int_max_str_digits(old_limit)
    refused(folder, "card", pointer)


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 0


def test_what_lies_just_within_the_limits_is_read(new: Version) -> None:
    folder = change_card(new, lambda c: c.update(metrics={"a": nested(30), "b": 10**308, "c": "\U0001f600"}))
    assert load_version(folder).card.metrics["b"] == 10**308


def test_an_encoder_needs_its_probe_and_a_preprocess_its_encoder(new: Version) -> None:
    (new.folder / PROBE).unlink()
    write_card(new.folder, new.card)
    refused(new.folder, r"probe\.npz is missing: an encoder requires a stored probe", "/probe.npz")
    (new.folder / ENCODER).unlink()
    write_card(new.folder, new.card)
    refused(new.folder, r"encoder\.onnx is missing: card\.json has a preprocess field", "/encoder.onnx")


def test_a_card_that_changed_since_registration_is_refused(new: Version) -> None:
    registered = sha256(new.folder / CARD)
    assert load_version(new.folder, expect_card=registered) == new
    change_card(new, lambda card: card.update(method="other"))
    with pytest.raises(InvalidVersionFolder, match="changed on disk after the version was registered"):
        load_version(new.folder, expect_card=registered)


def test_an_edge_is_written_where_the_card_finds_it(tmp_path: Path) -> None:
    edge = Edge("v2", "v1", EdgeKind.IDENTITY, {"cmc@1": Score(0.5, 0.4, 0.6)}, calibration={"a": 1}, support=7)
    write_edge(tmp_path, edge)
    write_card(tmp_path, Card("v2", 3, {"kind": "cosine"}))
    (loaded,) = load_version(tmp_path).edges
    assert (loaded.kind, loaded.scores, loaded.calibration) == (edge.kind, edge.scores, {"a": 1})
    assert loaded.support == 7


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(field=st.sampled_from([*Card("v", 3, {}).as_json(), "other"]), value=json_values)
def test_any_json_in_any_field_is_read_or_refused(field: str, value: Any) -> None:
    good = Card("v", 3, {"kind": "cosine"}, Preprocess(8, 8), files={"encoder.onnx": "0" * 64}).as_json()
    try:
        parse_card({**good, field: value})
        message = field
    except InvalidVersionFolder as error:
        message = error.message
    assert field in message
