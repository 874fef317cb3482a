from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import BodyTooLarge, InvalidBody
from service.http.bodies import strict_json
from service.http.bodies.strict_json import parse_any_json, parse_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text('a,]}\\"é:'),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text('ab]},"\\'), inner, max_size=6),
    max_leaves=60,
)


def test_what_is_json_is_read() -> None:
    assert parse_json(b'{"a": [1, 2.5, "\\ud83d\\ude00", null]}') == {"a": [1, 2.5, "😀", None]}
    assert parse_json('"\\\\ud800"') == "\\ud800"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"NaN",
        b"[-Infinity]",
        b"\xff",
        b'"\\ud800"',
        b'{"\\uDC00": 1}',
        b'[["a\\uD800"]]',
        b"1 2",
    ],
)
def test_what_is_not_json_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidBody, match="not JSON"):
        parse_json(raw)


@pytest.mark.parametrize(
    "raw", [b"[" * 99_999, b"[" * 50_000 + b"]" * 50_000, b'{"a":' * 50_000 + b"1" + b"}" * 50_000]
)
def test_what_is_nested_too_deeply_is_told_so(raw: bytes) -> None:
    with pytest.raises(InvalidBody, match="nested too deeply"):
        parse_json(raw)


@pytest.mark.parametrize(
    "text",
    [
        "[18446744073709551616]",
        '{"a": -9223372036854775809}',
        "[1e999]",
        '[0.1, "\\ud800"]',
        "[0.00012345678901234567]",
    ],
)
@pytest.mark.parametrize("repeated", [1, 50_000])
def test_numbers_and_halves_are_what_python_makes_of_them(text: str, repeated: int) -> None:
    text = f"[{','.join([text] * repeated)}]"

    assert repr(parse_any_json(text.encode())) == repr(json.loads(text))


def test_halves_of_surrogate_pairs_can_be_left_to_the_caller() -> None:
    assert parse_any_json(b'["\\ud800"]') == ["\ud800"]


@pytest.mark.parametrize(
    ("text", "pointer"),
    [
        (r'"\ud800"', ""),
        (r'["a", {"b": [], "c": [1, "\udc00"]}, "\ud800"]', "/1/c/1"),
        (r'{"a/b~": {"": "x\ud800y"}}', "/a~1b~0/"),
        (r'{"entries": [{"label": "\ud83d\ude00"}, {"label": {"x\ud800": 1}}]}', "/entries/1/label"),
        ('{"' + "a" * 500 + r'": "\ud800"}', f"/{'a' * 256}..."),
        ('{"a":' * 900 + r'"\ud800"' + "}" * 900, "/a" * 900),
    ],
)
def test_half_of_a_surrogate_pair_is_named(text: str, pointer: str) -> None:
    for place in ("", "/field"):
        with pytest.raises(InvalidBody, match="surrogate") as refused:
            parse_json(text, place)
        assert refused.value.pointer == place + pointer


@given(value=VALUES, spaces=st.sampled_from([None, 1]), ascii_only=st.booleans(), data=st.data())
def test_text_read_in_slices_is_what_it_is_as_a_whole(
    value: Any, spaces: int | None, ascii_only: bool, data: st.DataObject
) -> None:
    text = json.dumps(value, indent=spaces, ensure_ascii=ascii_only)
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(text)))
        text = text[:at] + data.draw(st.sampled_from(',]}1"e-:[ ')) + text[at + data.draw(st.integers(0, 2)) :]
    try:
        whole: Any = json.loads(text)
    except ValueError:
        whole = InvalidBody
    with pytest.MonkeyPatch.context() as patched:
        for name, small in {"SLICE": 40, "MIN_STEP": 8, "MAX_LONG": 1000}.items():
            patched.setattr(strict_json, name, small)
        try:
            read = parse_any_json(text)
        except InvalidBody:
            read = InvalidBody

    assert read == whole


@pytest.mark.parametrize(
    "text",
    [
        '{"items": [' + ",".join(['{"id": "a", "embedding": [0.5, 1, 2e3]}'] * 50_000) + "]}",
        "[" + "1," * 500_000 + "1]",
        "{" + ",".join(f'"{n}": {n}' for n in range(100_000)) + "}",
        '[{"a": [' + ("1," * 100_000 + "[" + "2," * 200_000 + "2]," + "{},") * 2 + "1]}]",
        "[" + " " * 600_000 + "]",
    ],
    ids=["items", "numbers", "fields", "mixed", "space"],
)
def test_no_long_text_is_parsed_in_one_go(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = 0

    class Watched(json.JSONDecoder):
        def raw_decode(self, s: str, idx: int = 0) -> tuple[Any, int]:
            nonlocal longest
            longest = max(longest, len(s) - idx)
            return super().raw_decode(s, idx)

    def watched(raw: bytes) -> Any:
        nonlocal longest
        longest = max(longest, len(raw))
        return loads(raw)

    loads = orjson.loads
    monkeypatch.setattr(strict_json, "JSONDecoder", Watched)
    monkeypatch.setattr("service.http.bodies.strict_json.orjson.loads", watched)

    assert parse_any_json(text) == json.loads(text)
    assert longest <= 2 * strict_json.SLICE < len(text)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[" + "[]," * strict_json.MAX_CONTAINERS + "[]]", BodyTooLarge),
        ("{" + ",".join(f'"{n}":1' for n in range(2 * strict_json.MAX_MEMBERS)) + "}", BodyTooLarge),
        ("[" + "1" * 600_000 + "]", InvalidBody),
        ("[" * 9 + "1," * 300_000 + "1" + "]" * 9, InvalidBody),
    ],
    ids=["containers", "members", "number", "depth"],
)
def test_what_would_take_too_long_or_too_much_is_refused(text: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        parse_any_json(text)
