"""The bytes of tokens, and where tokens begin in a text."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


def token_bytes(tokenizer: PreTrainedTokenizerBase, token: int) -> bytes:
    """Return the bytes that a token stands for within a text, also if it is a part of a character."""
    spelled = tokenizer.convert_ids_to_tokens(token)
    if spelled is None:  # an embedding without a token
        return b""
    if token in tokenizer.all_special_ids:
        return spelled.encode()
    decoder = repr(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None))
    if "ByteLevel" in decoder and all(letter in _LETTERS for letter in spelled):
        return bytes(_LETTERS[letter] for letter in spelled)
    byte = _BYTE.fullmatch(spelled)
    if byte and "ByteFallback" in decoder:
        return bytes([int(byte[1], 16)])
    # The first token of a text may lose its blank, the second does not.
    once, twice = (str(tokenizer.decode([token] * count)) for count in (1, 2))
    return twice[len(once) :].encode()


def _byte_letters() -> dict[str, int]:
    """Return the letters with which GPT-2 and later byte-level vocabularies spell bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_LETTERS = _byte_letters()


@dataclass
class Alignment:
    """Tokens beside the text that they were decoded to, as far as both are known."""

    text: str = ""
    place: int = 0  # of the next character in the text
    ahead: str = ""  # characters of tokens that the text does not have yet
    decoder: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))


def text_offsets(known: Alignment, text: str, tokens: Iterable[bytes]) -> list[int]:
    """Return where tokens begin in a text that grows; those within a character begin where it does.

    Args:
        known: what was aligned before, and is brought up to date.
        text: what is new in the text.
        tokens: those that are new, by their bytes.
    """
    known.text += text
    offsets = []
    for token in tokens:
        _go_on(known, "")
        offsets.append(known.place)
        _go_on(known, known.decoder.decode(token))
    return offsets


def _go_on(known: Alignment, more: str) -> None:
    known.ahead += more
    while known.ahead and known.place < len(known.text):
        character, known.ahead = known.ahead[0], known.ahead[1:]
        # Decoding strips blanks, and may write other ones; a byte that is no character can be more of U+FFFD.
        place = known.place
        while not character.isspace() and known.text[place : place + 1] in (" ", "\N{REPLACEMENT CHARACTER}"):
            if known.text[place] == character:
                break
            place += 1
        if known.text.startswith(character, place):
            known.place = place + 1
