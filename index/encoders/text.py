"""`TextEncoder`: texts -> embeddings in the same space as the version's images, by text/ of a version folder.

The model takes int64 `input_ids` and `attention_mask`, both (N, L), and returns (N, D). tokenizer.json defines
truncation and padding. Texts of several requests are padded to one length, so padding must not change an embedding.
Shape suffixes: N texts, L tokens, D dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from index.encoders.model import (
    INT64,
    Model,
    check_probe,
    check_shape,
    legal_difference,
    ready_to_compare,
    space_of,
)
from index.errors import InvalidText, NoTextEntrance
from index.execution import ONE_THREAD, Execution
from index.space import Vectors
from index.version import TEXT_ENCODER, TEXT_PROBE, TOKENIZER, Version
from index.version_folder.artifacts import read_expected, wrong_file
from index.version_folder.checked_json import parse_checked

if TYPE_CHECKING:
    import onnxruntime as ort
    from tokenizers import Tokenizer

MAX_CHARACTERS = 10_000
"""Largest number of characters of a query. The tokenizer truncates a text further."""
MAX_TOKENS = 512
"""Largest legal truncation of a tokenizer: the memory of attention grows with its square."""

INPUTS = ("input_ids", "attention_mask")

Tokens = NDArray[np.int64]
"""The token ids of one text, (L,), without padding."""


def check_text(text: object, most: int | None = MAX_CHARACTERS) -> str:
    """Return a text that can be embedded.

    Raises:
        InvalidText: not a string, empty, longer than `most` characters, or with half of a surrogate pair.
    """
    if not isinstance(text, str) or not text.strip():
        raise InvalidText("a text must be a non-empty string")
    if most is not None and len(text) > most:
        raise InvalidText(f"the text has {len(text)} characters; at most {most} are legal")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidText("the text has half of a surrogate pair") from error
    return text


class TextEncoder:
    """The text entrance of one version, verified against its card and its probe. Safe to share between threads."""

    batch = 64
    """Texts in one run."""
    tokens = 0
    """Tokens used so far; 0, as only providers count them (`service.registry.encoders.embedding_api`)."""

    def __init__(self, version: Version, execution: Execution = ONE_THREAD) -> None:
        """Open tokenizer and model, and run the probe.

        Raises:
            NoTextEntrance: the version has none.
            InvalidVersionFolder: the tokenizer, the model or the probe does not match the card.
        """
        if TEXT_ENCODER not in version.card.files:
            raise NoTextEntrance(f"version {version.name!r} has no text entrance")
        self._space, self._prompts = space_of(version.card), version.card.prompts
        self._tokenizer, self._limit, self._padding = _open_tokenizer(version)
        self._model = Model(version, TEXT_ENCODER, version.card.dim, _check_inputs, execution)
        self._run_probe(version)

    def prepare(self, text: str, side: str = "query") -> Tokens:
        """Tokenize a text after the version's prompt for its side, truncated as in tokenizer.json.

        Args:
            text: of any length (requests limit theirs).
            side: `query` or `item`, the key of the prompt in the card.

        Raises:
            InvalidText: see `check_text`; or the tokenizer fails or finds no token.
        """
        check_text(text, None)
        try:
            with panics_as_errors():
                tokens_L = np.asarray(self._tokenizer.encode(self._prompts.get(side, "") + text).ids, np.int64)
        except Exception as error:  # tokenizers raises plain `Exception`
            raise InvalidText(f"the tokenizer refuses the text ({error})") from error
        if not len(tokens_L):
            raise InvalidText("the text has no token that the tokenizer knows")
        return tokens_L

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Embed texts -> (N, D), valid for the version's space.

        Raises:
            InvalidText: a text cannot be embedded.
            InvalidVersionFolder: the output of the model does not match the card.
        """
        return self.vectors([self.prepare(check_text(text)) for text in texts])

    def vectors(self, texts: Sequence[Tokens]) -> Vectors:
        """Embed prepared texts in one run -> (N, D). Raises InvalidVersionFolder as `encode`."""
        vectors_ND = self._model.run(dict(zip(INPUTS, self._padding.pad(texts), strict=True)), "text")
        return ready_to_compare(vectors_ND, self._space, TEXT_ENCODER, "text")

    def run_batches(self, version: Version, largest: int) -> None:
        """Embed the probe's text, repeated to the maximum length, alone and in the `largest` batch of a service.

        Raises:
            InvalidVersionFolder: as `encode`.
        """
        longest_L = np.resize(self.prepare(read_text_probe(version)[0]), self._limit)
        for count in (1, largest):
            self.vectors([longest_L] * count)

    def _run_probe(self, version: Version) -> None:
        text, embedding_1D = read_text_probe(version)
        try:
            tokens_L = self.prepare(text)
        except InvalidText as error:
            raise wrong_file(TEXT_PROBE, f"has a text that cannot be embedded: {error.message}") from error
        alone = self.vectors([tokens_L])
        check_probe(TEXT_PROBE, "embedding", alone, embedding_1D)
        # A model that ignores its mask or mixes its batch returns another embedding in a batch with other texts.
        longer_L = np.resize(tokens_L, min(2 * len(tokens_L), self._limit))
        off = float(np.abs(self.vectors([longer_L, tokens_L, tokens_L[:1]])[1] - alone[0]).max())
        if not off <= legal_difference(alone):
            raise wrong_file(TEXT_ENCODER, f"embeds the probe differently beside a longer text (by {off:.2g})")


class _Padding:
    """The padding defined by tokenizer.json: to a fixed length, or to the longest text of a batch."""

    def __init__(self, stated: Mapping[str, Any]) -> None:
        self._id = int(stated.get("pad_id", 0))
        self._left = stated.get("direction") == "left"
        self.fixed = int(stated.get("length") or 0)
        self._multiple = int(stated.get("pad_to_multiple_of") or 1)

    def rounded(self, length: int) -> int:
        """A length rounded up to a multiple of `pad_to_multiple_of`."""
        return -(-length // self._multiple) * self._multiple

    def pad(self, texts: Sequence[Tokens]) -> tuple[Tokens, Tokens]:
        """Token ids and attention mask (1 for a token, 0 for padding), both (N, L)."""
        length = self.rounded(max([self.fixed, *map(len, texts)]))
        ids_NL = np.full((len(texts), length), self._id, np.int64)
        mask_NL = np.zeros((len(texts), length), np.int64)
        for row, tokens in enumerate(texts):
            place = slice(length - len(tokens), length) if self._left else slice(len(tokens))
            ids_NL[row, place], mask_NL[row, place] = tokens, 1
        return ids_NL, mask_NL


def _open_tokenizer(version: Version) -> tuple[Tokenizer, int, _Padding]:
    """Open the tokenizer, with its padding turned off; returns it, its truncation in tokens, and its padding."""
    from tokenizers import Tokenizer

    content = _read(version, TOKENIZER)
    try:
        with panics_as_errors():
            tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # tokenizers raises plain `Exception`
        raise wrong_file(TOKENIZER, f"is not a tokenizer ({error})") from error
    limit = int((tokenizer.truncation or {}).get("max_length", 0))
    if not 1 <= limit <= MAX_TOKENS:
        raise wrong_file(TOKENIZER, f"must state a truncation: max_length of 1 to {MAX_TOKENS} tokens, not {limit}")
    padding = _Padding(tokenizer.padding or {})
    if padding.fixed not in {0, limit}:
        raise wrong_file(TOKENIZER, f"pads to {padding.fixed} tokens but cuts at {limit}: a fixed length is one number")
    if padding.rounded(limit) > MAX_TOKENS:
        raise wrong_file(TOKENIZER, f"pads {limit} tokens to {padding.rounded(limit)}; at most {MAX_TOKENS} are legal")
    tokenizer.no_padding()
    return tokenizer, limit, padding


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise ValueError for a Rust panic, which a damaged file can cause in tokenizers and which is not an Exception."""
    try:
        yield
    except (Exception, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise ValueError(str(error)) from error


def _check_inputs(inputs: Sequence[ort.NodeArg]) -> None:
    given = {node.name: node for node in inputs}
    if set(given) != set(INPUTS) or any(node.type != INT64 for node in given.values()):
        found = ", ".join(f"{node.name}: {node.type}" for node in inputs)
        raise wrong_file(TEXT_ENCODER, f"needs the inputs {' and '.join(INPUTS)} of type {INT64}, not {found}")
    for name in INPUTS:
        check_shape(TEXT_ENCODER, f"input {name}", given[name].shape, ("L",))


def _read(version: Version, name: str) -> bytes:
    return read_expected(version.folder / name, name, version.card.files.get(name))


def read_text_probe(version: Version) -> tuple[str, Vectors]:
    """The text of a version's probe and its embedding (1, D). Raises InvalidVersionFolder."""
    dim = version.card.dim
    content = _read(version, TEXT_PROBE)
    try:
        stored = parse_checked(content, TEXT_PROBE)
        text, embedding = stored["text"], np.asarray(stored["embedding"], np.float32)
    except (ValueError, TypeError, KeyError) as error:
        raise wrong_file(TEXT_PROBE, "must be a JSON object with `text` and `embedding`") from error
    if not isinstance(text, str) or embedding.shape != (dim,) or not np.isfinite(embedding).all():
        raise wrong_file(TEXT_PROBE, f"must have a string `text` and `embedding`, a list of {dim} finite numbers")
    return text, embedding[None]
