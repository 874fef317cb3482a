"""What anybody may have written into names, metadata and reasons is shown as text, by every command that prints it."""

from __future__ import annotations

import io
import re

import httpx
import pytest

from regraft.terminal.console import visible
from service.doctor.examination import Doctor
from service.doctor.findings import Finding
from staging.api.hostile import COMMANDS, SHOWN, H

ACTING = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff]")
QUIET = {
    "key delete",
    "gallery index",
    "gallery create",
    "gallery export",
    "gallery delete",
    "version delete",
    "ingest",
    "evaluation add",
    "evaluation delete",
    "retire",
}
"""Of what the service says these print nothing but numbers when all goes well."""


@pytest.mark.parametrize(("line", "answers"), COMMANDS, ids=[line for line, _ in COMMANDS])
def test_hostile_data_is_shown_and_does_nothing(run, service, places, line, answers):
    service.answers |= answers

    code, shown, said = run(*line.format(**places).split())

    assert code in {0, 1, 3}
    assert service.requests
    assert not ACTING.search(shown + said)
    if not any(line.startswith(quiet) for quiet in QUIET):
        assert SHOWN in shown + said


def test_a_hostile_refusal_is_one_line_that_does_nothing(run, service):
    service.answers["GET /v1/galleries"] = httpx.Response(409, json={"code": "x", "detail": H})

    code, shown, said = run("gallery", "list")

    assert (code, shown) == (1, "")
    assert not ACTING.search(said)
    assert said.startswith("regraft: [/nobody][bold]:boom:")


@pytest.mark.parametrize(
    "line", ["evaluation add g {0}", "query g {0}", "backfill show {0}", "plan {0} {0} --items {0}"]
)
def test_wrong_usage_is_told_whatever_was_given(run, service, line):
    assert run(*line.format("[/nobody]").split())[0] == 2


def test_the_doctor_shows_hostile_names(run, monkeypatch, tmp_path):
    finding = Finding("lost", "error", "things", "call somebody", 1, [H])
    monkeypatch.setattr(Doctor, "examine", lambda self, *, fix: [finding])

    run("migrate", "--data", tmp_path)
    code, shown, _ = run("doctor", "--data", tmp_path)

    assert code == 1
    assert SHOWN in shown
    assert not ACTING.search(shown)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Ünïcode 北京 سلام 👩‍👧 a\u00adb", "Ünïcode 北京 سلام 👩‍👧 a\\xadb"),
        ("\x1b[31m\x9b\x7f\t\n", r"\x1b[31m\x9b\x7f\t\n"),
        ("\u202egnp\u2066\u200f\u061c\ufeff\u2029", r"\u202egnp\u2066\u200f\u061c\ufeff\u2029"),
        ("a\udcff.png", r"a\udcff.png"),
    ],
)
def test_what_acts_on_a_terminal_is_made_visible_and_writing_is_left_alone(text, shown):
    assert visible(text) == shown


def test_letters_that_standard_output_does_not_have_are_escaped(run, service, monkeypatch):
    service.answers["GET /v1/galleries/g/items/a"] = {"id": "a", "metadata": {"city": "Zürich 北京"}}
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="latin-1", write_through=True))

    assert run("item", "show", "g", "a")[0] == 0
    assert r"Zürich \u5317\u4eac" in written.getvalue().decode("latin-1")
