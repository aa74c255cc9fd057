"""Checked tokenisation: what is no text is refused, and special tokens that a user typed stay plain text."""

from __future__ import annotations

import copy
import re
import warnings
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor

from mmattn.errors import ConfigError, TextError, check_int

if TYPE_CHECKING:
    from open_clip.tokenizer import HFTokenizer, SimpleTokenizer
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class _Copy(NamedTuple):
    """A private copy of a fast tokenizer, and what the original was when it was made."""

    tokenizer: PreTrainedTokenizerBase
    state: object
    lock: Lock


_COPIES: WeakKeyDictionary[PreTrainedTokenizerBase, _Copy] = WeakKeyDictionary()
_COPYING = Lock()


def call_tokenizer(tokenizer: PreTrainedTokenizerBase, *texts: Any, **options: Any) -> Any:
    """Return what `tokenizer(*texts, **options)` returns, without a change that another thread could see.

    A fast tokenizer is one object for all threads, and padding, truncation and `split_special_tokens` of a call are
    settings of that object: a private copy is called in its place.
    """
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        return tokenizer(*texts, **options)
    private = _private(tokenizer)
    with private.lock:
        return private.tokenizer(*texts, **options)


def _private(tokenizer: PreTrainedTokenizerBase) -> _Copy:
    """Return the private copy of a fast tokenizer, made anew where the original has changed."""
    state = _state(tokenizer)
    with _COPYING:
        private = _COPIES.get(tokenizer)
        if private is None or private.state != state:
            private = _COPIES[tokenizer] = _Copy(copy.deepcopy(tokenizer), state, Lock())
    return private


def _state(tokenizer: PreTrainedTokenizerBase) -> object:
    """Return what ids depend on, without reading the vocabulary itself."""
    backend: Any = tokenizer.backend_tokenizer
    parts = (backend.normalizer, backend.pre_tokenizer, backend.post_processor, tokenizer.special_tokens_map)
    sides = (tokenizer.padding_side, tokenizer.truncation_side, tokenizer.model_max_length)
    return len(tokenizer), *map(repr, parts), *sides


def check_text(texts: str | Iterable[str]) -> list[str]:
    """The texts as a list, each checked; one string is a list of one.

    >>> check_text("a text")
    ['a text']
    """
    if isinstance(texts, (bytes, dict)) or not isinstance(texts, Iterable):
        raise TextError(f"texts must be strings, got {type(texts).__name__}; give a list of str")
    checked = [texts] if isinstance(texts, str) else list(texts)
    for number, text in enumerate(checked):
        if not isinstance(text, str):
            hint = "; decode it first" if isinstance(text, bytes) else "; leave the row out or give an empty string"
            raise TextError(f"text {number} must be a string, got {text!r:.40} ({type(text).__name__}){hint}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise TextError(
                f"text {number} has half a surrogate pair ({text[error.start]!r}) at character {error.start}. "
                "Repair it: text.encode('utf-8', 'replace').decode()"
            ) from error
    return checked


def tokenize(
    tokenizer: PreTrainedTokenizerBase,
    texts: str | Iterable[str],
    max_length: int | None = None,
    *,
    add_special_tokens: bool = False,
    reserved: Sequence[int] = (),
) -> tuple[list[list[int]], list[bool]]:
    """Ids of each text, and whether it was truncated; "</s>" in a text is four letters, not an end."""
    checked = check_text(texts)
    if max_length is not None:
        check_int("max_length", max_length)
    if not checked:
        return [], []
    options: dict[str, object] = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    rows = [list(row) for row in call_tokenizer(tokenizer, checked, **options)["input_ids"]]
    special = {*tokenizer.all_special_ids, *reserved} - {tokenizer.unk_token_id}
    for number, row in enumerate(rows):
        if spelled := special.intersection(row):
            raise _spells(f"text {number}", tokenizer, min(spelled))
    before, after = _ends(tokenizer, options) if add_special_tokens else ([], [])
    extra = len(before) + len(after)
    if max_length is not None and max_length < extra:
        raise TextError(f"max_length={max_length} leaves no room for text beside {extra} special tokens")
    cut = [max_length is not None and len(row) + extra > max_length for row in rows]
    if max_length is not None:
        rows = [row[: max_length - extra] for row in rows]
    return [before + row + after for row in rows], cut


def special_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return the special tokens of a tokenizer with their ids."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).items()
    named = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
    return {str(token): number for number, token in added if token.special} | dict(named)


def ids_with_plain(tokenizer: PreTrainedTokenizerBase, text: str, plain: Container[int]) -> list[int]:
    """Return the ids of a text with its special tokens; those that begin at the places `plain` stay plain text.

    Raises:
        TextError: a special token whose plain text the tokenizer cannot spell otherwise.
    """
    special = special_ids(tokenizer)
    numbers = set(special.values()) - {tokenizer.unk_token_id}
    pattern = special_pattern(special)
    tokens = [match[0] for match in pattern.finditer(text) if match.start() not in plain]
    options: dict[str, Any] = {"add_special_tokens": False, "verbose": False}
    ids = list(call_tokenizer(tokenizer, text, **options)["input_ids"])
    more = Counter(number for number in ids if number in numbers) - Counter(special[token] for token in tokens)
    if more:  # the text spells tokens that are to stay plain: what lies between the others is read piece by piece
        ids, start, options["split_special_tokens"] = [], 0, True
        for match in pattern.finditer(text):
            if match.start() not in plain:
                ids += [*_plain_ids(tokenizer, text[start : match.start()], options), special[match[0]]]
                start = match.end()
        ids += _plain_ids(tokenizer, text[start:], options)
        more = Counter(number for number in ids if number in numbers) - Counter(special[token] for token in tokens)
    if more:
        raise _spells("the text", tokenizer, min(more))
    return ids


def special_pattern(special: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern of all special tokens; the longest counts where several begin."""
    return re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)")


def _plain_ids(tokenizer: PreTrainedTokenizerBase, text: str, options: dict[str, Any]) -> list[int]:
    return list(call_tokenizer(tokenizer, text, **options)["input_ids"]) if text else []


def _spells(text: str, tokenizer: PreTrainedTokenizerBase, token: int) -> TextError:
    return TextError(
        f"{text} spells the token {tokenizer.convert_ids_to_tokens(token)!r}, which stands for something else here; "
        "take it out of the text, or add it to the tokenizer as a special token: add_special_tokens([...])"
    )


def _ends(tokenizer: PreTrainedTokenizerBase, options: dict[str, object]) -> tuple[list[int], list[int]]:
    bare = list(call_tokenizer(tokenizer, "a", **options)["input_ids"])
    full = list(call_tokenizer(tokenizer, "a", **options | {"add_special_tokens": True})["input_ids"])
    start = next(i for i in range(len(full)) if full[i : i + len(bare)] == bare)
    return full[:start], full[start + len(bare) :]


def refuse_empty(counts: Sequence[int]) -> None:
    """Refuse texts without a token."""
    for number, count in enumerate(counts):
        if count < 1:
            raise TextError(
                f"text {number} is empty: there is nothing to embed, and it would be near to anything; leave it out"
            )


def warn_cut(cut: Sequence[bool], length: int) -> None:
    """Warn of the texts that were truncated."""
    numbers = [number for number, was in enumerate(cut) if was]
    if numbers:
        warnings.warn(f"{len(numbers)} texts are longer than {length} tokens and were cut: {numbers[:5]}", stacklevel=3)


def text_length(max_length: int | None, longest: int, model: PreTrainedModel, name: object) -> int:
    """Return the most tokens of a text: `max_length`, or else the limit of tokenizer and model."""
    positions = getattr(model.config, "max_position_embeddings", None)
    for module_name, module in model.named_modules():
        if module_name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            positions = module.num_embeddings - module.padding_idx - 1  # RoBERTa and its kin count from after the pad
    if max_length is not None:
        return check_int("max_length", max_length, at_most=positions)
    longest = min(longest, positions or longest)
    if longest > 1 << 30:  # what a tokenizer says that does not know
        raise ConfigError(f"how many tokens {name} reads is not known; give max_length, as its card says")
    return longest


class ClipTokenizer:
    """A tokenizer of open_clip with checked texts, special tokens as plain text, and a warning of truncation."""

    def __init__(self, inner: SimpleTokenizer | HFTokenizer) -> None:
        self.inner = inner
        self.context_length: int = inner.context_length
        if hasattr(inner, "bpe"):
            inner.cache = {}  # It begins filled with the special tokens, which are then never spelled out.
        elif hasattr(inner, "tokenizer"):
            inner.tokenizer.split_special_tokens = True

    def __call__(self, texts: str | Iterable[str], context_length: int | None = None) -> Tensor:
        """Ids (b, l), truncated or padded to the context length; a UserWarning names the texts that were truncated."""
        checked = check_text(texts)
        length = context_length or self.context_length
        ids: Tensor = self.inner(checked, context_length=length)
        warn_cut([count > length for count in self._lengths(checked)], length)
        return ids

    def _lengths(self, texts: list[str]) -> list[int]:
        if not texts or hasattr(self.inner, "encode"):
            return [len(self.inner.encode(text)) + 2 for text in texts]
        cleaned = [getattr(self.inner, "clean_fn", str)(text) for text in texts]
        return (
            list(map(len, call_tokenizer(self.inner.tokenizer, cleaned, verbose=False)["input_ids"])) if texts else []
        )
