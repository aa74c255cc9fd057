"""Texts that a language model writes after prompts, in batches or piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from mmattn.data.text_batches import bos_and_eos, check_prompt
from mmattn.errors import TextError
from mmattn.memory import Memory
from mmattn.tokenization import tokenize


def prompt_rows(tokenizer: Any, prompts: Sequence[str]) -> list[list[int]]:
    """Ids of each prompt after the begin token; special tokens that a user typed stay plain text."""
    begin, _ = bos_and_eos(tokenizer)
    rows, _ = tokenize(tokenizer, prompts)
    return [[begin, *row] for row in rows]


def left_padded(tokenizer: Any, rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of ids as (b, l), padded on the left, and the mask (b, l) of what is text.

    Args:
        tokenizer: whose padding token is used, or its end token where it has none.
        rows: ids of each row.
        device: of the tensors.
    """
    longest = max(map(len, rows))
    pad = _pad(tokenizer)
    ids = torch.tensor([[*[pad] * (longest - len(row)), *row] for row in rows], device=device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask


@torch.no_grad()
def generate_texts(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    memory: Memory,
    *,
    batch_size: int = 64,
    options: Mapping[str, Any],
) -> list[str]:
    """What a model writes after each prompt, without the blanks around it.

    Args:
        model: the adapted model.
        tokenizer: of its host.
        prompts: one for each row of the memory; they may be empty.
        memory: as many rows.
        batch_size: rows at once.
        options: arguments of `generate`.

    Raises:
        TextError: a prompt that the model cannot read.
    """
    texts: list[str] = []
    rows = prompt_rows(tokenizer, prompts)
    for start in range(0, len(rows), batch_size):
        part = rows[start : start + batch_size]
        texts += generate_rows(model, tokenizer, part, memory[slice(start, start + len(part))], options=options)
    return [text.strip() for text in texts]


@torch.no_grad()
def generate_rows(
    model: Any, tokenizer: Any, rows: Sequence[Sequence[int]], memory: Memory | None, *, options: Mapping[str, Any]
) -> list[str]:
    """What a model writes after each prompt of one batch.

    Args:
        model: the adapted model.
        tokenizer: of its host.
        rows: ids of each prompt.
        memory: of as many rows; None for none.
        options: arguments of `generate`.

    Raises:
        TextError: a prompt that the model cannot read.
    """
    ids, mask = left_padded(tokenizer, rows, next(model.parameters()).device)
    given = arguments(model, tokenizer, ids, mask, options)
    made = model.generate(**given, **({} if memory is None else {"memory": memory}))
    return list(tokenizer.batch_decode(made[:, ids.shape[1] :], skip_special_tokens=True))


def stream_text(
    model: Any, tokenizer: Any, prompt: str, memory: Memory, *, options: Mapping[str, Any]
) -> Iterator[str]:
    """What a model writes after a prompt, piece by piece; leaving the loop ends the writing.

    Args:
        model: the adapted model.
        tokenizer: of its host.
        prompt: may be empty.
        memory: of one row.
        options: arguments of `generate`.

    Raises:
        TextError: a prompt that the model cannot read, or beams, which have no first word before the last.
    """
    ids, mask = left_padded(tokenizer, prompt_rows(tokenizer, [prompt]), next(model.parameters()).device)
    given = arguments(model, tokenizer, ids, mask, options)
    return stream_generate(model, tokenizer, {**given, "memory": memory})


def stream_generate(model: Any, tokenizer: Any, given: Mapping[str, Any]) -> Iterator[str]:
    """What `model.generate(**given)` writes, piece by piece; leaving the loop ends the writing.

    Args:
        model: the adapted model.
        tokenizer: of its host.
        given: arguments of `generate`, for one row.

    Raises:
        TextError: beams, which have no first word before the last.
    """
    if given.get("num_beams", 1) != 1:
        raise TextError(f"num_beams={given['num_beams']} cannot be streamed, as beams are chosen at the end: use 1")
    return _pieces(model, tokenizer, given)


def _pieces(model: Any, tokenizer: Any, given: Mapping[str, Any]) -> Iterator[str]:
    from transformers import StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer

    streamer: Any = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    failed: list[BaseException] = []
    left: list[bool] = []

    class Left(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            return torch.full((len(input_ids),), bool(left), device=input_ids.device)

    def write() -> None:
        try:
            with torch.no_grad():
                model.generate(**given, streamer=streamer, stopping_criteria=StoppingCriteriaList([Left()]))
        except BaseException as error:
            failed.append(error)
            streamer.end()

    writer = Thread(target=write, daemon=True)
    writer.start()
    try:
        for piece in streamer:
            if piece:
                yield piece
    finally:
        left.append(True)
        writer.join()
    if failed:
        raise failed[0]


def arguments(model: Any, tokenizer: Any, ids: Tensor, mask: Tensor, options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `generate` for prompts, checked.

    Args:
        model: the adapted model.
        tokenizer: of its host.
        ids: (b, l).
        mask: (b, l).
        options: further arguments, which come before the defaults.

    Raises:
        TextError: a prompt that the model cannot read.
    """
    _, end = bos_and_eos(tokenizer)
    given = {"do_sample": False, "eos_token_id": end, "pad_token_id": _pad(tokenizer), **options}
    check_prompt(ids, mask, model.config, int(given.get("max_new_tokens", 0)))
    return {"input_ids": ids, "attention_mask": mask, **given}


def _pad(tokenizer: Any) -> int:
    _, end = bos_and_eos(tokenizer)
    return end if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)
