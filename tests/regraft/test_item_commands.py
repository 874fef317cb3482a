"""`regraft item`: what a gallery holds, by a real service."""

from __future__ import annotations

import json

import httpx
import pytest

from regraft.client import Client, ImageItem
from regraft.commands import items
from service.settings import Settings
from service.store.galleries import filtering
from staging.api.served import serving
from staging.inputs.builders import image_bytes, make_image, make_version
from staging.shortcuts import short_starts

PICTURE = image_bytes(make_image(0, 0))


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    root = tmp_path_factory.mktemp("items")
    with short_starts(), serving(Settings(data=root / "data")) as served:
        assert served.register(make_version(root / "v1", "v1", 4)).status_code == 201
        yield served.url


@pytest.fixture
def gallery(url, request):
    """A gallery of three images, a.png to c.png."""
    name = f"g{abs(hash(request.node.name))}"
    with Client(url) as client:
        client.create_gallery(name)
        client.deploy(name, "v1")
        client.ingest(name, [ImageItem(f"{key}.png", image_bytes(make_image(n, n))) for n, key in enumerate("abc")])
    return name


def test_items_are_listed_page_by_page(run, url, gallery):
    code, shown, said = run("item", "list", gallery, "--limit", 2, "--url", url)
    cursor = said.split()[-1]
    _, rest, end = run("item", "list", gallery, "--limit", 2, "--cursor", cursor, "--url", url)

    assert code == 0
    assert [line.split()[:2] for line in shown.splitlines()] == [["item", "version"], ["a.png", "v1"], ["b.png", "v1"]]
    assert [line.split()[0] for line in rest.splitlines()] == ["item", "c.png"]
    assert end == ""
    assert json.loads(run("item", "list", gallery, "--url", url, "--json")[1])["next"] is None


def a_field(name, **test):
    return json.dumps({"field": name, **(test or {"eq": "red"})})


@pytest.mark.parametrize(
    ("where", "said"),
    [
        (a_field("colour"), 'hint: no item has a field "colour"; the first items have: "color", "shop.city", "tags"\n'),
        (a_field(["shop.city"]), 'hint: no item has a field ["shop.city"]; the first items have: "color", '),
        (f'{{"and": [{a_field("a")}, {{"not": {a_field("b", exists=False)}}}]}}', 'no item has a field "a" or "b"; '),
        (a_field("color"), ""),
        (a_field("shop", eq=1), ""),
        (a_field("late"), ""),
    ],
)
def test_a_filter_by_a_field_that_no_item_has_is_answered_with_those_that_they_have(run, url, gallery, where, said):
    first = {"color": "blue", "shop": {"city": "Bern"}, "tags": ["a", "b"]}
    with Client(url) as client:
        client.ingest(gallery, [ImageItem("a.png", PICTURE, first)])
        client.ingest(gallery, [ImageItem(f"{n}.png", PICTURE) for n in range(100)])
        client.ingest(gallery, [ImageItem("last.png", PICTURE, {"late": "yes"})])

    for command in (("item", "list", gallery), ("query", gallery, "--like", "a.png")):
        code, _, told = run(*command, "--filter", where, "--url", url)
        assert code == 0
        assert said in told
        assert bool(said) == bool(told)


def test_a_hint_that_cannot_be_given_is_no_error(run, service):
    refused = httpx.Response(403, json={"code": "forbidden", "detail": "no"})
    service.answers["GET /v1/galleries/g/items"] = [{"items": [], "next": None}, refused]

    code, _, told = run("item", "list", "g", "--filter", a_field("colour"))
    assert (code, told) == (0, "")


def test_items_that_pass_a_filter_fill_a_page(run, url, gallery, monkeypatch):
    monkeypatch.setattr(filtering, "MAX_EXAMINED", 1)
    with Client(url) as client:
        client.ingest(gallery, [ImageItem(f"{key}.png", PICTURE, {"n": n}) for n, key in enumerate("abcdefgh")])
    odd = ("--filter", json.dumps({"field": "n", "in": [3, 6, 7]}), "--url", url)

    _, shown, said = run("item", "list", gallery, "--limit", 2, *odd)
    rest = run("item", "list", gallery, "--limit", 2, "--cursor", said.split()[-1], *odd)[1]

    assert [line.split()[0] for line in shown.splitlines()] == ["item", "d.png", "g.png"]
    assert [line.split()[0] for line in rest.splitlines()] == ["item", "h.png"]
    assert (
        json.loads(run("item", "list", gallery, "--filter", "n=3", "--url", url, "--json")[2])["pointer"] == "/filter"
    )


def test_an_item_is_shown_with_what_it_holds_and_its_image(run, url, gallery, tmp_path):
    code, shown, _ = run("item", "show", gallery, "b.png", "--image", tmp_path / "b.png", "--url", url)

    assert (code, shown.splitlines()[-1].split()) == (0, ["v1", "encoded"])
    assert (tmp_path / "b.png").read_bytes() == image_bytes(make_image(1, 1))


def test_metadata_are_changed_by_ids_files_of_them_and_filters(run, url, gallery, tmp_path, monkeypatch):
    (tmp_path / "ids").write_text("none\nb.png\n")
    asked = ("item", "update", gallery, "--url", url, "--metadata")

    code, shown, said = run(*asked, '{"price": 3, "on": {"sale": true}}', "a.png", "--ids", tmp_path / "ids")
    assert (code, shown) == (1, f"changed the metadata of 2 items of {gallery}\n")
    assert said == "not changed: none: the gallery has no item of this id\n"
    with monkeypatch.context() as small:
        small.setattr(items, "CHANGED_AT_ONCE", 1)
        alone = run(*asked, '{"price": 3}', "none", "a.png", "gone")
        told = json.loads(run(*asked, '{"price": 3}', "none", "a.png", "gone", "--json")[1])
    assert alone[:2] == (1, f"changed the metadata of 1 item of {gallery}\n")
    assert [line.split(":")[1] for line in alone[2].splitlines()] == [" none", " gone"]
    assert (told["updated"], told["failed"], [one["index"] for one in told["errors"]]) == (1, 2, [0, 2])
    cheap = ("--filter", '{"field": "price", "eq": 3}')
    assert run(*asked, '{"price": null}', *cheap, "--dry-run")[:2] == (
        0,
        f"would change the metadata of 2 items of {gallery}\n",
    )
    assert json.loads(run(*asked, '{"price": null}', *cheap, "--json")[1])["updated"] == 2
    with Client(url) as client:
        assert [one.metadata for one in client.items(gallery).items] == [{"on": {"sale": True}}] * 2 + [{}]
    for wrong in ("price=3", "[]"):
        assert json.loads(run(*asked, wrong, "a.png", "--json")[2])["pointer"] == "/metadata"
    assert json.loads(run(*asked, "{}", "--json")[2])["pointer"] == "/ids"
    assert run("item", "update", gallery, "a.png", "--url", url)[0] == 2


def test_items_are_deleted_by_ids_and_files_of_them_once_that_is_confirmed(run, url, gallery, tmp_path, monkeypatch):
    monkeypatch.setattr(items, "CHANGED_AT_ONCE", 1)
    (tmp_path / "ids").write_text("\ufeffc.png\r\nnone\n\na.png\n")  # as Windows' editors begin a file
    asked = ("item", "delete", gallery, "a.png", "--ids", tmp_path / "ids", "--url", url)

    assert run(*asked)[0] == 1  # nobody answers
    assert json.loads(run(*asked, "--json")[2])["pointer"] == "/yes"
    code, shown, said = run(*asked, "--yes")

    assert (code, shown, said) == (0, f"deleted 2 of 3 items from {gallery}\n", "not found: none\n")
    assert [line.split()[0] for line in run("item", "list", gallery, "--url", url)[1].splitlines()] == ["item", "b.png"]


def test_items_that_pass_a_filter_are_counted_and_deleted(run, url, gallery):
    with Client(url) as client:
        client.ingest(gallery, [ImageItem(f"{key}.png", PICTURE, {"n": n}) for n, key in enumerate("abcd")])
    asked = ("item", "delete", gallery, "--filter", '{"field": "n", "range": {"lt": 3}}', "--url", url)

    assert run(*asked, "--dry-run")[1] == f"would delete 3 of 3 items from {gallery}\n"
    assert run(*asked)[0] == 1  # nobody answers
    assert run(*asked, "a.png", "--yes")[0] == 1
    assert run("item", "delete", gallery, "a.png", "--dry-run", "--url", url)[1] == (
        f"would delete 1 of 1 item from {gallery}\n"
    )
    assert json.loads(run(*asked, "--yes", "--json")[1]) == {"deleted": 3, "missing": []}
    assert [line.split()[0] for line in run("item", "list", gallery, "--url", url)[1].splitlines()] == ["item", "d.png"]


@pytest.mark.parametrize(("content", "said"), [(b"\xff", "cannot be read as ids"), (b"\n", "is required")])
def test_what_names_no_item_is_refused(run, url, gallery, tmp_path, content, said):
    (tmp_path / "ids").write_bytes(content)

    code, _, shown = run("item", "delete", gallery, "--ids", tmp_path / "ids", "--yes", "--url", url)

    assert (code, shown.count("\n"), said in shown) == (1, 1, True)
    assert run("item", "show", gallery, "none", "--url", url)[0] == 1
