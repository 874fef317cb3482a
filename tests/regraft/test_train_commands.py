"""`regraft evaluate` and `regraft fit-edge` on tiny versions, as a user runs them."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from index.version_folder.folder import load_version
from staging.inputs.builders import make_image, make_version
from training.data.checks import warn_once
from training.recipes import GROUPS, RECIPES


@pytest.fixture
def images(image_set):
    return ["--data", "arrays", "--root", image_set]


@pytest.fixture
def versions(tmp_path):
    v1 = make_version(tmp_path / "v1", "v1", 2)
    return v1, make_version(tmp_path / "v2", "v2", 4, drift=0.4, edges=[(v1, "truncate")])


def test_evaluate_prints_the_matrix_and_writes_what_it_measured(run, versions, images, tmp_path):
    old, new = versions

    code, shown, said = run("evaluate", new.folder, old.folder, *images, "--verification", "--out", tmp_path / "out")

    assert (code, said) == (0, "")
    rows = [line.split() for line in shown.splitlines()]
    assert ["v1", "v2"] in rows
    assert any(row[:3] == ["v2/v1", "truncate", "cmc@1"] for row in rows)
    assert "TPIR@FPIR=0.1" in shown
    assert f"wrote {tmp_path / 'out' / 'evaluation.json'}" in shown
    written = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert {c["order"] for c in written["curves"]} == {"random"}


def test_evaluate_takes_orders_a_metric_and_independent_versions(run, versions, images, tmp_path):
    old, new = versions
    shared, own = (make_version(tmp_path / name, name, 8, seed=seed) for name, seed in (("shared", 1), ("own", 2)))
    third = make_version(tmp_path / "v3", "v3", 4, drift=0.2, edges=[(new, "identity")])
    folders = [old.folder, new.folder, third.folder]
    options = ["--independent", shared.folder, "--independent", f"v3={own.folder}"]
    options += ["--order", "oldest", "--order", "random", "--metric", "mAP@1.0", "--out", tmp_path]

    code, _, _ = run("evaluate", *folders, *images, *options)
    written = json.loads((tmp_path / "evaluation.json").read_text())
    alone = run("evaluate", *folders, *images, "--independent", f"v2={shared.folder}")[1]

    assert code == 0
    assert {c["order"] for c in written["curves"]} == {"oldest", "random"}
    assert {c["metric"] for c in written["curves"]} == {"mAP@1.0"}
    assert set(written["p_up"]) == {"v2", "v3"}
    assert written["p_up"]["v2"] != written["p_up"]["v3"]
    assert "\nv2 " in alone.partition("P_up")[2].partition("backfill")[0]
    assert "\nv3 " not in alone.partition("P_up")[2].partition("backfill")[0]


def test_evaluate_asks_for_data_where_no_card_names_any(run, versions):
    code, _, said = run("evaluate", versions[0].folder)

    assert code == 1
    assert said == "regraft: --data is required: the newest version's card names no data set\n"


def test_an_export_replaces_no_other_version_unasked(run, versions, monkeypatch):
    import training.export

    written = []
    monkeypatch.setattr(training.export, "export", lambda _, out: written.append(out) or out)
    old, new = (version.folder for version in versions)

    refused = run("export", old, "--out", new)
    itself, asked = run("export", old, "--out", old), run("export", old, "--out", new, "--overwrite")

    assert [said[0] for said in (refused, itself, asked)] == [1, 0, 0]
    assert refused[2] == f"regraft: {new} already exists; --overwrite (overwrite=True) replaces it\n"
    assert written == [old, new]


@pytest.mark.parametrize("inside", ["", "results"])
def test_an_evaluation_is_not_written_into_a_version(run, versions, images, inside):
    folder = versions[0].folder
    before = sorted(folder.rglob("*"))

    code, _, said = run("evaluate", folder, *images, "--out", folder / inside)

    assert code == 1
    assert "is inside a version folder, which may only have its own files" in said
    assert sorted(folder.rglob("*")) == before


def test_an_evaluation_is_not_written_over_a_file(run, versions, images, tmp_path):
    (tmp_path / "file").touch()
    code, _, said = run("evaluate", versions[0].folder, *images, "--out", tmp_path / "file")

    assert (code, said) == (1, f"regraft: {tmp_path / 'file'} exists and is not a folder\n")


def test_options_of_evaluate_that_would_have_no_effect_are_refused(run, versions, images):
    old, new = (version.folder for version in versions)

    alone = run("evaluate", old, *images, "--independent", new)
    order = run("evaluate", old, *images, "--order", "alphabetical")
    rootless = run("evaluate", old, "--data", "folders")
    fit = run("fit-edge", old, new, "--kind", "ridge", "--data", "folders", "--overwrite")

    assert [said[0] for said in (alone, order, rootless, fit)] == [1, 1, 1, 1]
    assert alone[2] == f"regraft: --independent {new} has no effect: none of v1 has an edge\n"
    assert order[2].startswith("regraft: order must be one of ")
    assert rootless[2] == fit[2]
    assert rootless[2].startswith("regraft: --data folders requires --root, a folder with <class>/<image>")


def test_evaluate_warns_of_queries_that_find_themselves(run, versions, tmp_path, caplog):
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 255, (6, 8, 8, 3), np.uint8)
    parts = dict.fromkeys(("train", "query", "gallery"), pixels)
    labels = {f"{part}_labels": np.arange(6) % 2 for part in parts}
    np.savez(tmp_path / "a.npz", **{f"{part}_images": x for part, x in parts.items()}, **labels)
    warn_once.cache_clear()

    code, _, _ = run("evaluate", versions[0].folder, "--data", "arrays", "--root", tmp_path / "a.npz")

    assert code == 0
    assert caplog.messages == ["6 of 6 query images find a copy of themselves: results look better than they are"]


def test_of_several_folders_the_one_that_is_no_version_is_named(run, versions, tmp_path):
    (tmp_path / "empty").mkdir()
    for command in ("evaluate", "fit-edge", "plan"):
        options = ["--kind", "ridge"] if command == "fit-edge" else []
        said = run(command, versions[0].folder, tmp_path / "empty", *options)[2]

        assert said == f"regraft: {tmp_path / 'empty'}: card.json is missing or unreadable\n"


def test_evaluate_takes_the_newest_versions_own_data(run, versions, images, tmp_path):
    from index.version_folder.folder import write_card

    old, new = versions
    for version, root in ((old, "nowhere"), (new, str(images[3]))):
        write_card(
            version.folder, type(version.card)(**vars(version.card) | {"recipe": {"data": "arrays", "root": root}})
        )

    code, shown, _ = run("evaluate", new.folder, old.folder)

    assert code == 0
    assert shown.startswith("20 queries (0 without a relevant item), 30 items\n")


def test_fit_edge_writes_an_edge_and_warns_of_few_pairs(run, versions, images):
    old, new = versions

    # Before images are read.
    refused = run("fit-edge", old.folder, new.folder, "--data", "folders", "--root", "nowhere", "--kind", "low_rank")
    code, shown, said = run(
        "fit-edge", old.folder, new.folder, *images, "--kind", "low_rank", "--set", "rank=2", "--overwrite"
    )

    assert refused[0] == 1
    assert "--overwrite replaces it" in refused[2]
    assert code == 0
    assert said == "warning: 60 pairs: fewer than 4000 leave an adapter's score uncertain\n"
    assert shown.splitlines()[0] == "v2 -> v1: matrix, fitted on 60 pairs, measured with 20 queries"
    (edge,) = load_version(new.folder).edges
    assert f"new/old cmc@1: {edge.scores['cmc@1'].value:.3f} " in shown


def test_fit_edge_takes_pairs_from_a_file(run, versions, tmp_path):
    generator = np.random.default_rng(0)
    other = make_version(tmp_path / "other", "other", 3, encoder=False)
    bought = make_version(tmp_path / "bought", "bought", 5, encoder=False)
    x = generator.normal(size=(50, 5))
    np.savez(tmp_path / "pairs.npz", new=x, old=x[:, :3])

    code, shown, _ = run("fit-edge", other.folder, bought.folder, "--pairs", tmp_path / "pairs.npz", "--kind", "ridge")

    assert code == 0
    assert "new/old cmc@1: " in shown
    assert load_version(bought.folder).edges[0].support == 40


@pytest.mark.parametrize("given", [[], ["--pairs", "p.npz", "--data", "arrays"]])
def test_fit_edge_needs_pairs_from_one_place(run, versions, given):
    code, _, said = run("fit-edge", versions[0].folder, versions[1].folder, "--kind", "ridge", *given)

    assert code == 1
    assert said == "regraft: exactly one of --pairs and --data is required\n"


def test_recipes_are_listed_by_family_and_explained_field_by_field(run):
    overview, family, everything = run("recipes")[1], run("recipes", "digits")[1], run("recipes", "--all")[1]
    shown = run("recipes", "digits_bct")[1]

    assert len(overview.splitlines()) < 25
    assert "regraft train folders_v1 --set root=" in overview
    assert {line.split()[0] for line in overview.splitlines()[1 : len(GROUPS) + 1]} == set(GROUPS)
    assert {line.split()[0] for line in family.splitlines()[1:-1]} == set(GROUPS["digits"].recipes)
    assert all(f"{name} " in everything for name in RECIPES)
    rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in map(str.rstrip, shown.splitlines()[2:])}
    assert rows["epochs"] == ["30", "times over all training images."]
    assert {"method", "options", "root", "old"} <= set(rows)


@pytest.mark.parametrize("command", [("train", "digits_bt"), ("recipes", "digits_bt")])
def test_a_wrong_recipe_is_told_before_torch_is_loaded(run, monkeypatch, command):
    for module in ("torch", "training.train"):
        monkeypatch.setitem(sys.modules, module, None)

    code, _, said = run(*command)

    assert code == 1
    assert "'digits_bt'" in said
    assert "did you mean digits_bt2" in said


def test_train_replaces_a_version_only_when_told_to(run, tmp_path, monkeypatch):
    from training import train as path

    trained = []
    monkeypatch.setattr(path, "train", lambda recipe, out, **_: trained.append(out) or out)
    there = make_version(tmp_path / "v1", "v1", 3).folder
    code, _, said = run("train", "digits_v1", "--out", there)
    assert (code, trained) == (1, [])
    assert f"{there} already exists; --overwrite" in said
    assert run("train", "digits_v1", "--out", there, "--overwrite")[0] == 0
    assert trained == [there]


def test_train_saves_a_recipe_as_a_file_and_trains_from_one(run, tmp_path, monkeypatch):
    from training import train as path

    trained = []
    monkeypatch.setattr(path, "train", lambda recipe, out, **_: trained.append((recipe, out)) or out)
    mine = tmp_path / "mine.toml"

    code, shown, _ = run("train", "digits_bct", "--set", "weight=7", "--set", "preprocess.height=9", "--save", mine)
    assert (code, trained) == (0, [])
    assert f"wrote {mine}" in shown
    code, _, said = run("train", mine, "--set", "epochs=3", "--out", tmp_path / "v2")
    ((recipe, out),) = trained
    assert (code, said, out) == (0, "", tmp_path / "v2")
    assert (recipe.name, recipe.method, recipe.epochs, recipe.preprocess.height) == ("digits_bct", "bct", 3, 9)
    assert recipe.options["weight"] == 7
    run("train", "folders_v1", "--size", "96", "--out", tmp_path / "v1")
    run("train", mine, "--size", "10", "--set", "preprocess.width=12")
    assert [(one.preprocess.height, one.preprocess.width, one.preprocess.resize) for one, _ in trained[1:]] == [
        (96, 96, 108),
        (10, 12, 10),
    ]
    depends = tmp_path / "depends.toml"
    told = []
    monkeypatch.setattr(path, "train", lambda recipe, out, references, **_: told.append(references) or out)
    run("train", "folders_bct", "--set", "old.epochs=3", "--save", depends)
    run("train", depends, "--set", "old.rate=0.5")
    assert [(made["old"].epochs, made["old"].rate) for made in told] == [(3, 0.5)]
    code, _, said = run("train", tmp_path / "none.toml")
    assert code == 1
    assert "none.toml cannot be read as a recipe" in said


def test_a_sweep_that_could_not_be_saved_does_not_begin(run, tmp_path, monkeypatch):
    from training.comparison import sweep as search

    monkeypatch.setattr(search, "sweep", lambda *_, **__: pytest.fail("began"))
    (there := tmp_path / "best.toml").write_text("rate = 1\n")

    for save, said in ((there, "it already exists"), (tmp_path / "no" / "best.toml", "does not exist")):
        code, _, err = run("sweep", "digits_l2", "--trials", "1", "--save", save)
        assert (code, said in err) == (1, True)
    assert there.read_text() == "rate = 1\n"


def test_a_sweep_takes_a_size_and_replaces_other_trials_only_when_told_to(run, tmp_path, monkeypatch):
    from training.comparison import sweep as search

    told = []
    monkeypatch.setattr(search, "sweep", lambda recipe, *_, overwrite, log: told.append((recipe, overwrite)) or [])

    run("sweep", "digits_l2", "--size", "10", "--out", tmp_path)
    run("sweep", "digits_l2", "--overwrite", "--out", tmp_path)
    assert [(recipe.preprocess.width, recipe.preprocess.resize, said) for recipe, said in told] == [
        (10, 10, False),
        (8, None, True),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("protocol", "methods", "row", "ours"),
    [
        # With both independent versions; then with the one.
        (
            "cifar100-b",
            ["bct", "oca", "bt2", "fct", "hbct"],
            "| hbct | HBCT, Table 1 | 42.5 [33.0] | 57.2 [39.8] | 72.2 [65.5] |",
            7,
        ),
        ("cifar100-a", ["oca", "fct"], "| oca | OCA | 31.3 [23.3] | 41.4 [", 3),
    ],
    ids=["b", "a"],
)
def test_a_protocol_is_reproduced_from_an_empty_folder_within_a_limit_and_gone_on_with(
    protocol, methods, row, ours, run, tmp_path
):
    labels, arrays = np.arange(312) % 52, {}
    for part, count, seed in (("train", 312, 0), ("query", 104, 1000), ("gallery", 104, 2000)):
        arrays[f"{part}_labels"] = labels[:count]
        arrays[f"{part}_images"] = np.stack([np.asarray(make_image(int(labels[n]), seed + n)) for n in range(count)])
    np.savez(tmp_path / "tiny.npz", **arrays)
    small = ["data=arrays", "backbone=small_cnn_32", "epochs=1", "side_epochs=1", "batch_size=64", "threads=1"]
    small += [*(f"preprocess.{part}=32" for part in ("height", "width", "resize")), "warmup_epochs=0", "workers=0"]
    command = ["reproduce", protocol, "--root", tmp_path / "tiny.npz", "--out", tmp_path / "out"]
    command += [word for setting in small for word in ("--set", setting)]
    command += [word for method in methods for word in ("--method", method)]

    code, _, said = run(*command, "--minutes", 0.02)
    assert (code, "continue from the last finished epoch" in said) == (130, True)
    code, shown, said = run(*command)
    again = run(*command)

    assert (code, said) == (0, "")
    assert row in shown
    assert shown.count("| ours (1 seed) |") == ours
    assert "training" not in again[1].split("protocol")[0]


def test_a_papers_table_is_shown_a_line_a_row(run, tmp_path, monkeypatch):
    monkeypatch.setattr("training.comparison.schedule.compare_methods", lambda *_, **__: None)

    code, shown, _ = run("reproduce", "cifar100-b", "--root", tmp_path, "--method", "hbct")

    assert code == 0
    assert "| hbct | HBCT, Table 1 | 42.5 [33.0] | 57.2 [39.8] | 72.2 [65.5] | 0.505 | 0.210 |" in shown.splitlines()


def test_evaluate_and_fit_edge_leave_out_what_training_left_out_unless_told_otherwise(run, versions, tmp_path):
    from index.version_folder.folder import write_card

    for number in range(24):
        place = tmp_path / "photos" / ("train" if number % 4 > 1 else "test") / ("ant" if number % 2 else "bee")
        place.mkdir(parents=True, exist_ok=True)
        make_image(number % 2, number).save(place / f"{number:02}.png")
    (tmp_path / "photos" / "test" / "ant" / "01.png").write_bytes(b"no picture")
    old, new = versions
    recipe = {"data": "folders", "root": str(tmp_path / "photos"), "unreadable": "skip"}
    write_card(new.folder, type(new.card)(**vars(new.card) | {"recipe": recipe}))
    pair = [old.folder, new.folder]
    fitted = ["fit-edge", *pair, "--kind", "zero_pad", "--overwrite"]
    fitted += ["--data", "folders", "--root", tmp_path / "photos"]

    assert run("evaluate", *pair)[0] == 0
    assert run(*fitted)[0] == 0
    for command in (["evaluate", *pair], fitted):
        code, _, said = run(*command, "--unreadable", "refuse")
        assert (code, "ant/01.png" in said) == (1, True)
