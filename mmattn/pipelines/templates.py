"""Ids of templates with texts in them: special tokens of the template are tokens, those that a text spells are text."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from mmattn.errors import ConfigError, TextError
from mmattn.tokenization import ids_with_plain, special_ids, special_pattern

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def template_ids(tokenizer: PreTrainedTokenizerBase, template: str, fields: Mapping[str, str]) -> list[int]:
    """Return the ids of a template with texts for its fields, as the tokenizer gives them for the whole text."""
    mark, special = _new_mark(), special_ids(tokenizer)
    for field, text in fields.items():
        template = template.replace(field, _marked(text, mark, special))
    return ids_with_plain(tokenizer, *_unmarked(template, mark))


def chat_ids(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Return the ids of a conversation and the begin of its answer, as `apply_chat_template` gives them.

    Raises:
        ConfigError: the template refuses the messages.
        TextError: a message spells a special token that the template reads or the tokenizer cannot spell otherwise.
    """
    mark, special = _new_mark(), special_ids(tokenizer)
    marked = [
        {key: text if key == "role" else _marked(text, mark, special) for key, text in message.items()}
        for message in messages
    ]
    text, places = _unmarked(_rendered(tokenizer, marked), mark)
    if text != _rendered(tokenizer, messages):
        raise TextError(
            "the messages spell a special token that the chat template of the host reads: take it out of the text"
        )
    return ids_with_plain(tokenizer, text, places)


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]]) -> str:
    from jinja2 import TemplateError

    try:
        return str(tokenizer.apply_chat_template(list(map(dict, messages)), tokenize=False, add_generation_prompt=True))
    except TemplateError as error:
        raise ConfigError(f"the chat template of the host refuses these messages: {error}") from error


def _new_mark() -> str:
    """Return what no text has, and what a template leaves as it is: digits have no case and need no escape."""
    return f"{secrets.randbelow(10**30):030}"


def _marked(text: str, mark: str, special: Collection[str]) -> str:
    """Put a mark before each special token that a text spells, and before the begin of one at its end."""
    places = {match.start() for match in special_pattern(special).finditer(text)}
    longest = max(map(len, special), default=0)
    for start in range(max(0, len(text) - longest), len(text)):
        if any(token.startswith(text[start:]) for token in special):
            places.add(start)
    edges = [0, *sorted(places), len(text)]
    return mark.join(text[start:stop] for start, stop in pairwise(edges))


def _unmarked(text: str, mark: str) -> tuple[str, set[int]]:
    """Return a text without marks, and the places where they stood."""
    pieces = text.split(mark)
    places, length = set(), 0
    for piece in pieces[:-1]:
        length += len(piece)
        places.add(length)
    return "".join(pieces), places
