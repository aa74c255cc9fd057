"""Log-probabilities by token: the bytes of each, and where it begins in the text, whole and in a stream."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mmattn.serving.answers import Echo, Format
from mmattn.serving.engine import Job, Piece, SamplingSettings, TokenLogprob, Writer

TEXTS = ["A 😀 smile", "👩‍👩‍👧 né", " red flower", "  two", "naïve 漢字 do", "a . b", "😀😀", "é", "smile"]
ENDS: Any = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def make_tokenizer(build: str) -> Any:
    """A tokenizer of letters and a few words; what it does not know it spells in bytes, but for WordPiece."""
    words = ["<unk>", "<s>", "</s>"]
    if build == "byte-level":
        words += sorted(pre_tokenizers.ByteLevel.alphabet())
        merges = [("s", "m"), ("Ġ", "sm"), ("ð", "Ł"), ("Ġ", "r"), ("Ã", "©")]
        words += [first + second for first, second in merges]
        core = Tokenizer(models.BPE({word: n for n, word in enumerate(words)}, merges))
        core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    elif build == "byte fallback":
        words += [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", *"Asmilerdfowtbné.ï", "▁s", "▁sm", "▁r"]
        merges = [("▁", "s"), ("▁s", "m"), ("▁", "r")]
        vocabulary = {word: n for n, word in enumerate(words)}
        core = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        core.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    else:
        letters = [*"Asmilerdfowtbnavéï.漢字😀👩👧\u200d"]
        words += [*letters, *(f"##{letter}" for letter in letters), "smile"]
        core = Tokenizer(models.WordPiece({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
        core.pre_tokenizer, core.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece(cleanup=True)
    return PreTrainedTokenizerFast(tokenizer_object=core, **ENDS)


BUILDS = ("byte-level", "byte fallback", "WordPiece")


def written(tokenizer: Any, prompt: list[int], ids: list[int], *, chat: bool, echo: bool, stream: bool) -> list[Any]:
    """The choices of a response, or of the events of a stream, after these tokens were generated."""
    writer = Writer(
        Job(prompt, None, 97, SamplingSettings(logprobs=0), echoes=echo), tokenizer, [2], torch.device("cpu")
    )
    assert writer.sampler is not None
    writer.sampler.logprobs = [TokenLogprob(one, -1.0, ((one, -1.0),)) for one in ids]
    echoed = Echo(prompt, [TokenLogprob(one, -1.0) for one in prompt[1:]])
    form = Format(chat, "tiny", tokenizer, len(prompt), 1, {0: echoed} if echo else {})
    pieces = (
        [writer.read(ids[: n + 1], n + 1 == len(ids)) for n in range(len(ids))] if stream else [writer.read(ids, True)]
    )
    return [form.choice(0, piece, stream) for piece in pieces if piece is not None]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_a_chat_are_those_of_its_text(build: str, text: str, stream: bool) -> None:
    """Invariant 165."""
    tokenizer = make_tokenizer(build)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    choices = written(tokenizer, [1], ids, chat=True, echo=False, stream=stream)
    parts = [part for one in choices for part in one["logprobs"]["content"]]
    joined = b"".join(bytes(one["bytes"]) for one in parts)
    said = "".join(one["delta" if stream else "message"]["content"] for one in choices)
    assert len(parts) == len(ids) and joined.decode().strip() == said.strip()
    assert said.strip() == tokenizer.decode(ids).strip()
    assert all(one["top_logprobs"][0]["bytes"] == one["bytes"] for one in parts)


@pytest.mark.parametrize("echo", [False, True], ids=["alone", "echo"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("text", TEXTS)
def test_offsets_are_places_in_the_text(build: str, text: str, stream: bool, echo: bool) -> None:
    """Invariant 165: of each token that is no part of a character; parts of one begin where it does."""
    tokenizer = make_tokenizer(build)
    prompt = [1, *tokenizer("né 😀 s", add_special_tokens=False)["input_ids"]]
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], 2]
    choices = written(tokenizer, prompt, ids, chat=False, echo=echo, stream=stream)
    said = "".join(one["text"] for one in choices)
    tokens, offsets = ([part for one in choices for part in one["logprobs"][key]] for key in ("tokens", "text_offset"))
    assert len(tokens) == len(offsets) == len(ids) + len(prompt) * echo
    whole = tokenizer.decode([*prompt, *ids[:-1]]) if echo else tokenizer.decode(ids[:-1]).lstrip()
    assert said == whole
    assert offsets == sorted(offsets) and offsets[-1] == len(said)
    inside = list(zip(tokens[:-1], offsets, strict=False))
    for token, offset in inside:
        if "\N{REPLACEMENT CHARACTER}" not in token:
            assert said[offset:].startswith((token, token.lstrip())), (token, offset, said)
    emoji = said.find("😀")
    if build != "WordPiece" and emoji >= 0:
        parts = [token for token, offset in inside if offset == emoji and token.strip()]
        assert len(parts) >= 2 and set("".join(parts)) == {"\N{REPLACEMENT CHARACTER}"}


def test_likely_parts_of_characters_are_told_apart() -> None:
    """Invariant 165: they look alike as text, and none is lost."""
    tokenizer = make_tokenizer("byte-level")
    first, second = tokenizer.convert_tokens_to_ids(["ð", "Ã"])
    form = Format(False, "tiny", tokenizer, 1, 2)
    likely = TokenLogprob(first, -1.0, ((first, -1.0), (second, -2.0)))
    (told,) = form.choice(0, Piece("", 1, None, [likely]))["logprobs"]["top_logprobs"]
    assert told == {"\N{REPLACEMENT CHARACTER}": -1.0, "bytes:\\xc3": -2.0}
