"""The sample of a gate: which items are queries, which are compared, and what is left out."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select, update

from index.encoders.encoder import Encoder
from index.version import Version
from service.store.tables import item
from service.upgrades.gates import embedded_sides, sides
from staging.api.steps import gate_by_digit, refusal
from staging.inputs.builders import add_text, make_version


class TestSample:
    def test_sampled_queries_meet_the_whole_gallery_and_what_is_stored_is_not_embedded_again(
        self,
        served: Any,
        labelled: Any,
        versions: dict[str, Version],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        path, counted = labelled(), Counter[int]()
        whole, encode = gate_by_digit(served, path, "v2", metric="mAP@1.0").json(), Encoder.encode_arrays
        monkeypatch.setattr(embedded_sides, "TIMED", 0)

        def counting(encoder: Encoder, pixels: Any) -> Any:
            made = encode(encoder, pixels)
            counted.update([made.vectors.shape[1]] * len(pixels))
            return made

        monkeypatch.setattr(Encoder, "encode_arrays", counting)
        monkeypatch.setattr(sides, "MAX_EMBEDDED", 0)

        report = gate_by_digit(served, path, "v2", sample=8, metric="mAP@1.0").json()

        assert (report["queries"], report["items"], report["whole"], report["exhaustive"]) == (8, 20, True, False)
        assert (report["new_new_items"], report["gap_closed"]) == (8, None)
        assert counted == {versions["v2"].card.dim: 8}
        assert (whole["queries"], whole["items"], whole["whole"], whole["exhaustive"]) == (20, 20, True, True)
        assert whole["new_new_items"] == 20
        # Each query ranks all twenty: the mean over drawn ones is near that over all, not that of eight items.
        spread = whole["old_old"]["high"] - whole["old_old"]["low"]
        assert abs(report["old_old"]["value"] - whole["old_old"]["value"]) < spread

    @pytest.mark.parametrize(
        ("pairs", "embedded", "current", "items"), [(80, 8, "v1", 10), (10**8, 8, "v2", 8), (10**8, 12, "v2", 12)]
    )
    def test_what_is_not_affordable_is_sampled_and_said(
        self,
        served: Any,
        labelled: Any,
        monkeypatch: pytest.MonkeyPatch,
        pairs: int,
        embedded: int,
        current: str,
        items: int,
    ) -> None:
        """Too many pairs to compare; or a current version that has embedded none of the items itself."""
        path = labelled()
        served.deploy(path, "v2")
        new = "chain" if current == "v2" else "v2"
        if current == "v1":
            served.http.post(f"{path}/rollback")
        monkeypatch.setattr(sides, "MAX_PAIRS", pairs)
        monkeypatch.setattr(sides, "MAX_EMBEDDED", embedded)

        report = gate_by_digit(served, path, new, sample=8).json()

        assert (report["current"], report["items"], report["whole"]) == (current, items, False)
        assert report["new_new_items"] == embedded

    def test_slices_are_those_of_the_queries(self, served: Any, pictures: list[bytes]) -> None:
        path = served.filled(pictures, about=lambda n: {"digit": n % 5, "half": n // 10})

        report = gate_by_digit(served, path, "v2", sample=15, slice="half").json()

        assert (report["items"], sum(part["queries"] for part in report["slices"])) == (20, 15)

    def test_what_one_version_cannot_embed_is_left_out_where_both_rank_the_items(
        self, served: Any, labelled: Any, pictures: list[bytes]
    ) -> None:
        path = labelled()
        supplied = [{"id": "old", "metadata": {"digit": 1}, "embedding": [1, 0, 0, 0]}]
        assert served.http.post(f"{path}/items", json={"items": supplied}).json()["failed"] == 0
        served.deploy(path, "v2")
        supplied = [{"id": "new", "metadata": {"digit": 1}, "embedding": [1, 0, 0, 0, 0, 0]}]
        assert served.http.post(f"{path}/items", json={"items": supplied}).json()["failed"] == 0
        served.http.post(f"{path}/rollback")

        reports = [gate_by_digit(served, path, "v2", label=label).json() for label in (None, "digit")]

        assert [(report["items"], report["unreadable"]) for report in reports] == [(20, 0), (21, 0)]

    def test_images_are_items_but_no_queries_of_a_version_that_embeds_texts(
        self, served: Any, pictures: list[bytes], tmp_path: Path
    ) -> None:
        words = {"north": np.eye(4)[0], "east": np.eye(4)[1]}
        both = add_text(make_version(tmp_path / "both", "both", 4), words)
        told = add_text(make_version(tmp_path / "told", "told", 4, encoder=False, edges=[(both, "identity")]), words)
        for version in (both, told):
            assert served.register(version).status_code == 201
        path = served.filled(pictures, "both", about=lambda n: {"digit": n % 5})
        texts = [{"id": f"t{n}", "text": "north", "metadata": {"digit": 0}} for n in range(3)]
        assert served.http.post(f"{path}/items", json={"items": texts}).json()["failed"] == 0

        report = gate_by_digit(served, path, "told").json()

        assert (report["queries"], report["items"], report["new_new_items"]) == (3, 23, 3)

    def test_where_a_version_has_no_encoder_items_with_images_are_measured_by_their_embeddings(
        self, served: Any, labelled: Any
    ) -> None:
        path = labelled()
        held = [{"id": f"i{n}", "embedding": [1.0, n, 0, 0]} for n in range(12)]
        sent = served.http.put(f"{path}/items:embeddings", json={"version": "blind", "items": held})
        assert sent.json()["failed"] == 0

        reports = [gate_by_digit(served, path, "blind", label=label).json() for label in (None, "digit")]
        served.deploy(path, "blind", override="only its gates are of interest")
        back = [gate_by_digit(served, path, "sighted", label=label).json() for label in (None, "digit")]

        # Eight items hold no embedding by it: they are on the gallery side of queries that need no own ranking.
        assert [(report["queries"], report["items"]) for report in reports] == [(12, 12), (12, 20)]
        assert [(report["queries"], report["items"]) for report in back] == [(12, 12), (12, 12)]

    def test_items_without_image_or_label_deleted_and_unreadable_ones_are_left_out(
        self, served: Any, labelled: Any, pictures: list[bytes]
    ) -> None:
        path = labelled()
        served.ingest(path, {"unlabelled": pictures[0]})
        served.http.post(
            f"{path}/items", json={"items": [{"id": "e", "metadata": {"digit": 1}, "embedding": [1, 0, 0, 0]}]}
        )
        served.http.delete(f"{path}/items/i0")
        with served.runtime.database.write() as connection:
            one = select(item.c.blob, item.c.id).where(item.c.external_id == "i1").order_by(item.c.id.desc())
            blob, key = connection.execute(one).first()
            connection.execute(update(item).where(item.c.id == key).values(blob="gone"))
        served.runtime.blobs.remove([blob])

        report = gate_by_digit(served, path, "v2").json()

        # What holds an embedding by v1 is found, whether or not it has an image that can ask.
        assert (report["queries"], report["items"], report["unreadable"], report["unlabelled"]) == (18, 20, 1, 1)

    @pytest.mark.parametrize("labels", [[1, "1", True, 1, "1", True], [1, 2, {"n": [0]}, 1.0, 2.0, {"n": [-0.0]}]])
    def test_labels_of_any_json_type_are_told_apart_by_value(
        self, served: Any, pictures: list[bytes], labels: list[Any]
    ) -> None:
        path = served.gallery("v1")
        items = [{"id": str(n), "metadata": {"digit": label}, "image": str(n)} for n, label in enumerate(labels)]
        served.post_items(path, items, [(str(n), pictures[n % 3]) for n in range(6)])

        report = gate_by_digit(served, path, "v2").json()

        assert (report["queries"], report["old_old"]["value"]) == (6, 1.0)

    def test_labels_that_nobody_shares_are_refused(self, served: Any, labelled: Any, pictures: list[bytes]) -> None:
        path = labelled()
        items = [{"id": str(n), "metadata": {"name": n}, "image": str(n)} for n in range(3)]
        served.post_items(path, items, [(str(n), pictures[n]) for n in range(3)])

        assert refusal(gate_by_digit(served, path, "v2", label="name")) == (422, "invalid_argument", ["/label"])
        assert refusal(gate_by_digit(served, path, "v2", label="colour")) == (422, "invalid_argument", ["/label"])
        assert refusal(gate_by_digit(served, served.gallery("v1"), "v2", label=None)) == (
            422,
            "invalid_argument",
            ["/label"],
        )

    def test_when_no_image_can_be_read_the_label_is_refused(self, served: Any, labelled: Any) -> None:
        path = labelled()
        with served.runtime.database.write() as connection:
            mine = select(item.c.id).order_by(item.c.id.desc()).limit(20)
            connection.execute(update(item).where(item.c.id.in_(mine)).values(blob="gone"))

        assert refusal(gate_by_digit(served, path, "v2")) == (422, "invalid_argument", ["/label"])
        assert refusal(gate_by_digit(served, path, "v2", label=None)) == (422, "invalid_argument", ["/label"])
