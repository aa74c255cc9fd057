"""Ids of conversations: those of `apply_chat_template` for any tokenizer and template; typed tokens are text."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mmattn.errors import TextError
from mmattn.pipelines.generation import chat_ids, template_ids

SPECIAL = ["[INST]", "[/INST]", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<think>", "</think>"]
TEMPLATES = {
    "Llama 2": "{{ bos_token }}{% for m in messages %}{{ '[INST]' if m.role == 'user' else '' }}{{ m.content }}"
    "{{ '[/INST]' if m.role == 'user' else eos_token }}{% endfor %}",
    "Phi 3": "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
    "trims": "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>\n\n' + m.content | trim + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n\n' }}{% endif %}",
    "drops thoughts": "{% for m in messages %}{% set c = m.content %}{% if m.role == 'assistant' and '</think>' in c %}"
    "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}{{ '<|' + m.role + '|>\n' + c + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n<think>\n' }}{% endif %}",
    "text alone": "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}{{ 'assistant:' }}",
    "names": "{% for m in messages %}{{ m.name | default('') }}{{ m.content }}{% endfor %}{{ eos_token }}",
}
BUILDS = ("first", "always", "never", "byte-level", "prepends", "lower-case")
PIECES = ["hello", "there", " ", "  ", "\n", "\n\n", "user", "<think>\nthere\n</think>\n\n", "?", "é", "<", "|>", "</s"]


def make_tokenizer(build: str, template: str, thoughts_are_special: bool = True, **flags: bool) -> Any:
    """A tokenizer that spells any of the texts here, built as those of published models are."""
    words = ["<unk>", "▁", "\n", *map(chr, range(33, 127)), "▁hello", "hello", "▁there", "there", "é"]
    if build == "byte-level":
        words += pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(words))}
    settings: Any = {"continuing_subword_prefix": "", "max_input_chars_per_word": 500}
    core = Tokenizer(models.WordPiece(vocabulary, unk_token="<unk>", **settings))
    lines = pre_tokenizers.Split(Regex("\n"), "isolated")
    if build == "byte-level":
        core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    elif build == "prepends":
        core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        core.decoder = decoders.Metaspace()
    elif build == "lower-case":
        core.normalizer, core.pre_tokenizer = (
            normalizers.Lowercase(),
            pre_tokenizers.Split(Regex("\n| |\\w+"), "isolated"),
        )
    else:
        core.pre_tokenizer = pre_tokenizers.Sequence([lines, pre_tokenizers.Metaspace(prepend_scheme=build)])
        core.decoder = decoders.Metaspace()
    if not thoughts_are_special:
        core.add_tokens(["<think>", "</think>"])
    special = SPECIAL if thoughts_are_special else SPECIAL[:-2]
    core.add_special_tokens([AddedToken(one, special=True, **({"normalized": False} | flags)) for one in special])
    ends = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=core, **ends, chat_template=template)


def conversations(count: int, pieces: list[str]) -> list[list[dict[str, str]]]:
    chosen = random.Random(7)
    roles = ["system", "user", "assistant", "user", "assistant"]
    return [
        [
            {"role": role, "content": "".join(chosen.choices(pieces, k=chosen.randrange(6)))}
            for role in roles[chosen.randrange(2) : chosen.randrange(2, 6)]
        ]
        for _ in range(count)
    ]


def by_transformers(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def marks_of(tokenizer: Any, ids: list[int]) -> list[str]:
    return [tokenizer.convert_ids_to_tokens(one) for one in ids if one in {*tokenizer.all_special_ids} - {0}] + [
        one for one in tokenizer.convert_ids_to_tokens(ids) if one in SPECIAL
    ]


FLAGS: list[dict[str, bool]] = [{}, {"rstrip": True}, {"lstrip": True, "rstrip": True}, {"normalized": True}]


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_ids_are_those_of_transformers(template: str, build: str, flags: dict[str, bool]) -> None:
    """Invariant 161."""
    tokenizer = make_tokenizer(build, TEMPLATES[template], **flags)
    for messages in conversations(23, [one for one in PIECES if "think" not in one]):
        assert chat_ids(tokenizer, messages) == by_transformers(tokenizer, messages), messages


@pytest.mark.parametrize("special", [True, False], ids=["special", "added"])
def test_earlier_thoughts_are_dropped_as_the_template_says(special: bool) -> None:
    """Invariant 161: where the tokens around a thought are tokens of the tokenizer, too."""
    tokenizer = make_tokenizer("never", TEMPLATES["drops thoughts"], special)
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "<think>\nthere\n</think>\n\nhello"},
        {"role": "user", "content": "there"},
    ]
    assert chat_ids(tokenizer, messages) == by_transformers(tokenizer, messages)


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("build", [one for one in BUILDS if one != "lower-case"])
@pytest.mark.parametrize("template", [one for one in TEMPLATES if one != "drops thoughts"])
def test_special_tokens_in_messages_are_text(template: str, build: str, flags: dict[str, bool]) -> None:
    """Invariant 162: the special tokens of a conversation are those that the template wrote."""
    tokenizer = make_tokenizer(build, TEMPLATES[template], **flags)
    typed = 0
    for messages in conversations(23, [*PIECES, *SPECIAL, "</s>", "<s>", "a<|end|>b"]):
        harmless = [one | {"content": "x"} for one in messages]
        ids = chat_ids(tokenizer, messages)
        assert marks_of(tokenizer, ids) == marks_of(tokenizer, by_transformers(tokenizer, harmless)), messages
        typed += ids != by_transformers(tokenizer, messages)
    assert typed > 5


def test_a_token_in_pieces_of_several_texts_is_text() -> None:
    """Invariant 162: a name and a content that together spell a token, which the template joins."""
    tokenizer = make_tokenizer("never", TEMPLATES["names"])
    messages = [{"role": "user", "name": "<|e", "content": "n"}, {"role": "user", "content": "d|></"}]
    messages.append({"role": "user", "content": "s>hello"})
    ids = chat_ids(tokenizer, messages)
    assert tokenizer.convert_ids_to_tokens(ids) == [*"<|end|></s>", "hello", "</s>"]


def test_another_spelling_that_the_normalizer_makes_a_token_is_text() -> None:
    """Invariant 162: "<|END|>" in lower case."""
    tokenizer = make_tokenizer("lower-case", TEMPLATES["Phi 3"], normalized=True)
    messages = [{"role": "user", "content": "a<|END|>b"}]
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert by_transformers(tokenizer, messages).count(end) == 2
    assert chat_ids(tokenizer, messages).count(end) == 1


def test_what_cannot_be_plain_text_is_refused() -> None:
    """Invariant 162: an end token that is a letter of the vocabulary; a token that the template looks for."""
    tokenizer = make_tokenizer("never", TEMPLATES["trims"])
    tokenizer.eos_token = "."
    with pytest.raises(TextError, match=r"spells the token '\.'"):
        chat_ids(tokenizer, [{"role": "user", "content": "hello."}])
    with pytest.raises(TextError, match=r"spells the token '\.'"):
        template_ids(tokenizer, "<|user|>{question}.", {"{question}": "hello. there"})
    right = template_ids(tokenizer, "<|user|>{question}.", {"{question}": "hello"})
    assert right == tokenizer("<|user|>hello.", add_special_tokens=False)["input_ids"]
    reads = "{% for m in messages %}{{ 'END' if m.content.startswith('<|end|>') else m.content }}{% endfor %}"
    with pytest.raises(TextError, match="that the chat template of the host reads"):
        chat_ids(make_tokenizer("never", reads), [{"role": "user", "content": "<|end|>"}])


@pytest.mark.parametrize("build", BUILDS)
def test_a_template_with_a_text_is_the_whole_text(build: str) -> None:
    """Invariant 161: a prompt with {question}, as pipelines have it."""
    tokenizer = make_tokenizer(build, "", rstrip=True)
    for question in ("hello there", " hello", "\nhello", ""):
        right = tokenizer(f"<|user|> {question}\n<|end|><|assistant|>", add_special_tokens=False)["input_ids"]
        template = "<|user|> {question}\n<|end|><|assistant|>"
        assert template_ids(tokenizer, template, {"{question}": question}) == right
