"""Ids of prompts and templates, and the texts that a language model generates after them."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Generator, Mapping, Sequence
from itertools import pairwise
from threading import Thread
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmattn.data.text_batches import bos_and_eos, check_prompt
from mmattn.errors import ConfigError, TextError
from mmattn.hosts.context import Arguments, Keywords
from mmattn.hosts.model import AdaptedModel
from mmattn.memory import Memory
from mmattn.pipelines.config import VisibleFrom
from mmattn.tokenization import check_text, ids_with_plain, special_ids, special_pattern, tokenize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mmattn.retrieval import IndexMemory


#: A text, or ids.
Prompt = str | list[int]


def prompt_rows(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Return the ids of each text after the start token, special tokens in it as plain text; ids stay as they are."""
    rows = []
    for prompt in prompts:
        if isinstance(prompt, str):
            rows.append([bos_and_eos(tokenizer)[0], *tokenize(tokenizer, [prompt])[0][0]])
        else:
            rows.append(prompt)
    return rows


def prompt_with(tokenizer: PreTrainedTokenizerBase, prompt: str, text: str) -> Prompt:
    """Return a prompt with a text: in place of "{question}" in a template, or behind it; TextError if it is missing."""
    (text,) = check_text([text])
    if "{question}" not in prompt:
        return prompt + text
    if not text.strip():
        raise TextError('the adapter answers questions, and none was asked: give text="…"')
    return template_ids(tokenizer, prompt, {"{question}": text.strip()})


def end_ids(model: AdaptedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids that end a text: of the tokenizer, and of the host's generation config."""
    config = getattr(model, "generation_config", None)
    ends = getattr(config, "eos_token_id", None)
    more = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    return list(dict.fromkeys([bos_and_eos(tokenizer)[1], *more]))


@torch.no_grad()
def generate_texts(
    model: AdaptedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    memory: Memory | IndexMemory | None = None,
    *,
    batch_size: int = 64,
    visible_from: VisibleFrom = "first_token",
    options: Keywords,
) -> list[str]:
    """Generate a text after each prompt, greedily unless the options say otherwise.

    Args:
        model: a causal language model, with adapters where there is a memory.
        tokenizer: of the model.
        prompts: the texts to continue, each after the start token, special tokens in them as plain text; or their ids.
        memory: a row for each prompt, or a searched memory for at most `batch_size` prompts; None for the bare model.
        batch_size: prompts at once.
        visible_from: the first token of a prompt that sees the memory, as in `PipelineConfig`.
        options: of `generate`.

    Returns:
        The new text of each prompt, without blanks around it.

    Raises:
        TextError: a prompt leaves no room for new tokens.
    """
    texts: list[str] = []
    for start in range(0, len(prompts), batch_size):
        part = prompts[start : start + batch_size]
        part_memory = memory[slice(start, start + len(part))] if isinstance(memory, Memory) else memory
        given = generate_arguments(model, tokenizer, part, part_memory, visible_from, options)
        out = model.generate(**given)[:, given["input_ids"].shape[1] :]
        texts += tokenizer.batch_decode(out, skip_special_tokens=True)
    return [text.strip() for text in texts]


def generate_arguments(
    model: AdaptedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    memory: Memory | IndexMemory | None,
    visible_from: VisibleFrom,
    options: Keywords,
) -> Arguments:
    """Return the arguments of `generate` for prompts, padded on the left, and their memory; checked."""
    device = next(model.parameters()).device
    rows = [torch.tensor(row, dtype=torch.long) for row in prompt_rows(tokenizer, prompts)]
    pad = bos_and_eos(tokenizer)[1] if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)
    ids = pad_sequence(rows, True, pad, "left").to(device)
    mask = pad_sequence(list(map(torch.ones_like, rows)), True, 0, "left").to(device)
    defaults = {"do_sample": False, "eos_token_id": end_ids(model, tokenizer), "pad_token_id": pad}
    merged: Arguments = {**defaults, **options}
    check_prompt(ids, mask, model.config, int(merged.get("max_new_tokens", 0)))
    return {"input_ids": ids, "attention_mask": mask, **merged, **memory_arguments(memory, mask, visible_from)}


def memory_arguments(memory: Memory | IndexMemory | None, mask: Tensor, visible_from: VisibleFrom) -> Arguments:
    """Return the arguments of a call for the memory of prompts with this mask (b, l), padded on the left."""
    if memory is None:
        return {}
    if visible_from == "first_token":
        return {"memory": memory}
    arrived = torch.zeros_like(mask)
    arrived[:, -1] = torch.iinfo(mask.dtype).max  # all slots
    return {"memory": memory, "arrived": arrived}


def stream_generate(
    model: AdaptedModel, tokenizer: PreTrainedTokenizerBase, options: Keywords
) -> Generator[str, None, None]:
    """Yield the text of `model.generate(**options)` for one row piece by piece; beams raise TextError."""
    if options.get("num_beams", 1) != 1:
        raise TextError(f"num_beams={options['num_beams']} cannot be streamed, as beams are chosen at the end: use 1")
    from transformers import StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer

    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    errors: list[BaseException] = []
    stopped = False

    class Stopped(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
            return torch.full((len(input_ids),), stopped, device=input_ids.device)

    def write() -> None:
        try:
            with torch.no_grad():
                model.generate(**options, streamer=streamer, stopping_criteria=StoppingCriteriaList([Stopped()]))
        except BaseException as error:
            errors.append(error)
            streamer.end()

    writer = Thread(target=write, daemon=True)
    writer.start()
    try:
        for piece in streamer:
            if piece:
                yield piece
    finally:
        stopped = True
        writer.join()
    if errors:
        raise errors[0]


# Templates ------------------------------------------------------------------------------------------------------------

# Special tokens of a template are tokens; those that a text in it spells are text.


def template_ids(tokenizer: PreTrainedTokenizerBase, template: str, fields: Mapping[str, str]) -> list[int]:
    """Return the ids of a template with texts for its fields, as the tokenizer gives them for the whole text."""
    mark, special = _new_mark(), special_ids(tokenizer)
    for field, text in fields.items():
        template = template.replace(field, _marked(text, mark, special))
    return ids_with_plain(tokenizer, *_unmarked(template, mark))


def chat_ids(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Return the ids of a conversation and the start of its answer, as `apply_chat_template` gives them.

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
    """Put a mark before each special token that a text spells, and before the start of one at its end."""
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
