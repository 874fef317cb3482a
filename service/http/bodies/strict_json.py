"""Strict JSON parsing of requests in slices, so that other threads never wait long for a large body; see `parse_json`.

A parser holds the GIL from the first character to the last. So a list or object longer than a slice is read many short
members at a time, or member by member, and only shorter parts go to a parser as a whole: to orjson, which is fast, or,
where that refuses or would round, to Python's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from json import JSONDecodeError, JSONDecoder
from typing import Any, NoReturn

import orjson

from index.errors import pointer_to
from service.errors import BodyTooLarge, InvalidBody
from service.registry.embedding import errors_at

SLICE = 1 << 18
"""Characters that are parsed at a time, in one or two milliseconds."""
MAX_LONG = 8
"""How deep lists and objects longer than a slice may be nested."""
MIN_STEP = 64
"""Below so many characters, members are read one by one."""
MAX_CONTAINERS = 1_000_000
"""Most lists and objects in one body: each takes many times the memory of its two characters."""
MAX_MEMBERS = 100_000
"""Most members of an object longer than a slice: merging them holds the GIL."""
CUT_OFF = 16
"""A value cut by the end of a slice fails at most so many characters before the end; a string at its own beginning."""

_SPACE = re.compile(r"[ \t\n\r]*")
_CLOSING = {"[": "]", "{": "}"}
_UNREAD = object()
_SHAPES = bytes.maketrans(b"123456789-,:[ \t\n\r", b"000000000" + b"," * 8)
_WIDE = b"," + b"0" * 19


class NotForOrjson(Exception):
    """The text has something that orjson refuses or would round: Python's parser decides."""


def parse_json(raw: bytes | str, pointer: str = "") -> Any:
    """Parse JSON. NaN, Infinity and halves of surrogate pairs are refused, as they could never be sent back.

    Args:
        raw: the text.
        pointer: where it is in the request; errors name this place, or the one below it that is invalid.

    Raises:
        InvalidBody: it is not such JSON; says where.
        BodyTooLarge: there are too many lists and objects, or an object has too many members.
    """
    with errors_at(pointer):
        value = parse_any_json(raw)
    if _may_hold_halves(raw) and not is_whole(value):
        raise InvalidBody(
            "the body is not JSON: a string has half of a surrogate pair", pointer=pointer + _half_in(value)
        )
    return value


def parse_any_json(raw: bytes | str) -> Any:
    """As `parse_json`, but halves of surrogate pairs are left to the caller (`is_whole`). Raises as `parse_json`."""
    try:
        with suppress(NotForOrjson):
            if len(raw) <= SLICE and (value := _quickly(raw)) is not _UNREAD:
                return value
        text = raw if isinstance(raw, str) else raw.decode()
        if (containers := text.count("[") + text.count("{")) > MAX_CONTAINERS:
            raise BodyTooLarge(f"the body has {containers} lists and objects; at most {MAX_CONTAINERS} are legal")
        return _Reader(text).whole()
    except RecursionError as error:
        raise InvalidBody("the body is nested too deeply") from error
    except ValueError as error:
        raise InvalidBody(f"the body is not JSON: {error}") from error


def _quickly(text: bytes | str) -> Any:
    """Parse a list or an object by orjson; `_UNREAD` if it is neither, or not JSON.

    Raises:
        NotForOrjson: Python's parser may read it: it has half of a surrogate pair, a number beyond float64, or an
            integer that may have more than 64 bits, which would become a float: one of nineteen digits or more.
    """
    raw = text.encode() if isinstance(text, str) else text
    if _WIDE in raw.translate(_SHAPES):
        raise NotForOrjson
    try:
        return orjson.loads(raw) if raw.startswith((b"[", b"{")) else _UNREAD
    except ValueError as error:
        if b"\\u" in raw or "infinity" in str(error):
            raise NotForOrjson from error
        return _UNREAD


def _may_hold_halves(raw: bytes | str) -> bool:
    """Whether the text may have the escape of a surrogate."""
    if isinstance(raw, str):
        return "\\ud" in raw or "\\uD" in raw
    return b"\\" in raw and (b"\\ud" in raw or b"\\uD" in raw)  # finding one byte is faster than three


def is_whole(value: Any) -> bool:
    """Whether no string of a JSON value holds half of a surrogate pair."""
    remaining = [value]
    while remaining:
        one = remaining.pop()
        if isinstance(one, str) and not one.isascii():
            try:
                one.encode()
            except UnicodeEncodeError:
                return False
        elif isinstance(one, list):
            remaining += one
        elif isinstance(one, dict):
            remaining += one
            remaining += one.values()
    return True


def _half_in(value: Any) -> str:
    """The JSON pointer of the first string that holds half of a surrogate pair; of a name of a member, its object."""
    names: list[object] = []
    levels: list[Iterator[tuple[object, Any]]] = [enumerate([value])]
    while levels:
        for name, inner in levels[-1]:
            names[len(levels) - 1 :] = [name]
            if not is_whole(list(inner) if isinstance(inner, dict) else inner if isinstance(inner, str) else ""):
                return pointer_to(*names[1:])
            if isinstance(inner, (list, dict)):
                levels.append(iter(inner.items()) if isinstance(inner, dict) else enumerate(inner))
                break
        else:
            levels.pop()
    return ""


class _Reader:
    """Reads one text; positions are in characters."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._parse = JSONDecoder(parse_constant=_not_json).raw_decode
        # The part of the text in which values are parsed: a copy, so that no parser reads beyond it.
        self._window, self._begin = text[: 2 * SLICE], 0
        # How many characters of short members are read at a time; fewer if there are long ones between them.
        self._step = SLICE

    def whole(self) -> Any:
        """The value that the text is."""
        value, at = self._field(self._skip(0), 0)
        if self._skip(at) < len(self._text):
            raise JSONDecodeError("Extra data", self._text, at)
        return value

    def _field(self, at: int, depth: int) -> tuple[Any, int]:
        """The value of a field, often most of the text; one that seems to end after the window is read in parts."""
        self._move_window(at)
        if depth < MAX_LONG and self._seems_long(at):  # at the depth limit, try it as a whole: a short one is legal
            return self._long(at, depth)
        return self._value(at, depth)

    def _seems_long(self, at: int) -> bool:
        """Whether the rest of the window opens more lists, or objects, than it closes."""
        opening, begin, end = self._text[at : at + 1], at - self._begin, self._begin + len(self._window)
        if opening not in _CLOSING or end == len(self._text):
            return False
        return self._window.count(opening, begin) > self._window.count(_CLOSING[opening], begin)

    def _value(self, at: int, depth: int) -> tuple[Any, int]:
        """The value that begins at `at`, and its end."""
        self._move_window(at)
        begin, window = self._begin, self._window
        last = begin + len(window) == len(self._text)
        try:
            value, end = self._parse(window, at - begin)
        except JSONDecodeError as error:
            if last or (error.pos < len(window) - CUT_OFF and not error.msg.startswith("Unterminated string")):
                raise JSONDecodeError(error.msg, self._text, begin + error.pos) from None
        else:
            # A number at the end of the window may continue.
            if last or end < len(window) - CUT_OFF:
                return value, begin + end
        return self._long(at, depth)

    def _long(self, at: int, depth: int) -> tuple[Any, int]:
        """A value that is longer than a slice."""
        if depth == MAX_LONG:
            raise ValueError(f"lists and objects longer than {SLICE} characters are nested more than {MAX_LONG} deep")
        first = self._text[at]
        if first == "[":
            return self._list(at, depth + 1)
        if first == "{":
            return self._object(at, depth + 1)
        if first == '"':
            return self._parse(self._text, at)
        raise JSONDecodeError(f"A number of more than {SLICE} characters", self._text, at)

    def _list(self, at: int, depth: int) -> tuple[list[Any], int]:
        found: list[Any] = []
        at = self._skip(at + 1)
        if self._text[at : at + 1] == "]":  # long by its white space
            return found, at + 1
        while True:
            if (many := self._read_members(at, "[]")) is not None:
                members, at = many
                found += members
                continue
            value, at = self._value(at, depth)
            found.append(value)
            at, ended = self._next(at, "]")
            if ended:
                return found, at

    def _object(self, at: int, depth: int) -> tuple[dict[str, Any], int]:
        found: dict[str, Any] = {}
        at = self._skip(at + 1)
        if self._text[at : at + 1] == "}":
            return found, at + 1
        while True:
            if len(found) > MAX_MEMBERS:
                raise BodyTooLarge(f"an object has more than {MAX_MEMBERS} members")
            if (many := self._read_members(at, "{}")) is not None:
                members, at = many
                found |= members
                continue
            if self._text[at : at + 1] != '"':
                raise JSONDecodeError("Expecting property name enclosed in double quotes", self._text, at)
            name, at = self._value(at, depth)
            at = self._skip(at)
            if self._text[at : at + 1] != ":":
                raise JSONDecodeError("Expecting ':' delimiter", self._text, at)
            found[name], at = self._field(self._skip(at + 1), depth)
            at, ended = self._next(at, "}")
            if ended:
                return found, at

    def _read_members(self, at: int, brackets: str) -> tuple[Any, int] | None:
        """Parse several members up to a comma; returns them and where the next begins. None: read them one by one.

        The comma separates members if the text before it is valid JSON; lists and objects also have brackets around it.
        """
        opening = self._text[at : at + 1]
        while self._step > MIN_STEP and (end := self._last_comma(at, opening)) > at:
            members = self._whole(brackets[0] + self._text[at:end] + brackets[1])
            if members is not _UNREAD:
                self._step = min(2 * self._step, SLICE)
                return members, self._skip(end + 1)
            self._step //= 2
        self._step = min(2 * max(self._step, MIN_STEP), SLICE)
        return None

    def _last_comma(self, at: int, opening: str) -> int:
        """The last comma within a step that may separate members, if the first of them begins with `opening`."""
        if opening not in _CLOSING:
            return self._text.rfind(",", at, at + self._step)
        before = _CLOSING[opening]
        return 1 + max(self._text.rfind(f"{before},{space}{opening}", at, at + self._step) for space in ("", " "))

    def _whole(self, part: str) -> Any:
        """The value of a part; `_UNREAD` if it is not JSON."""
        try:
            return _quickly(part)
        except NotForOrjson:
            pass
        try:
            value, end = self._parse(part)
        except JSONDecodeError:
            return _UNREAD
        return value if end == len(part) else _UNREAD

    def _next(self, at: int, closing: str) -> tuple[int, bool]:
        """Where the next member begins and False, or the position after the closing bracket and True."""
        at = self._skip(at)
        if self._text[at : at + 1] == closing:
            return at + 1, True
        if self._text[at : at + 1] != ",":
            raise JSONDecodeError("Expecting ',' delimiter", self._text, at)
        return self._skip(at + 1), False

    def _move_window(self, at: int) -> None:
        """Move the window so that it holds at least a slice from `at`, or the rest of the text."""
        end = self._begin + len(self._window)
        if at < self._begin or (at + SLICE > end and end < len(self._text)):
            self._window, self._begin = self._text[at : at + 2 * SLICE], at

    def _skip(self, at: int) -> int:
        """Where white space ends."""
        found = _SPACE.match(self._text, at)
        assert found is not None
        return found.end()


def _not_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")
