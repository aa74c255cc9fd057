"""Two tokenizers over one text: which tokens of one lie where a token of the other does, by spans of characters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmattn.errors import ConditionError
from mmattn.tokenization import call_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def retokenize(
    input_ids: Tensor, real: Tensor, tokenizer: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the text of ids (b, p) in the tokens of another tokenizer; both are fast ones, which know spans.

    Returns:
        ids (b, q) of the other tokenizer, which of them are real (b, q), and the share (b, p, q) that each has of the
        characters of a token; those of a real token add up to 1.

    Raises:
        ConditionError: ids that the tokenizer does not give for the text that they spell.
    """
    rows: list[tuple[list[int], Tensor]] = []
    for number, (all_ids, mask) in enumerate(zip(input_ids.tolist(), real.tolist(), strict=True)):
        ids = [token for token, is_real in zip(all_ids, mask, strict=True) if is_real]
        text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        options = {"add_special_tokens": False, "return_offsets_mapping": True}
        again, new = (call_tokenizer(one, text, **options) for one in (tokenizer, other))
        if again["input_ids"] != ids:
            raise ConditionError(
                f"row {number} has ids that its tokenizer does not give for their text {text!r:.40}, so that spans of "
                "characters are not known: tokenize the text anew"
            )
        rows.append((new["input_ids"], _shares(again["offset_mapping"], new["offset_mapping"])))
    longest = max((len(ids) for ids, _ in rows), default=0)
    padded = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in rows], dtype=torch.long)
    new_real = torch.arange(longest) < torch.tensor([len(ids) for ids, _ in rows])[:, None]
    shares = torch.zeros(*input_ids.shape, longest)
    for row, (ids, share) in enumerate(rows):
        shares[row, real[row].cpu(), : len(ids)] = share
    return padded, new_real, shares


def _shares(spans: list[tuple[int, int]], others: list[tuple[int, int]]) -> Tensor:
    """Return the share of each other token in the characters of each token (p, q); of no common one the nearest."""
    begin, end = torch.tensor(spans, dtype=torch.float).view(-1, 2).T
    other_begin, other_end = torch.tensor(others, dtype=torch.float).view(-1, 2).T
    common = torch.minimum(end[:, None], other_end) - torch.maximum(begin[:, None], other_begin)
    nearest = common == common.amax(1, keepdim=True) if common.numel() else common
    shares = torch.where((common > 0).any(1, keepdim=True), common.clamp(min=0), nearest.to(common))
    return shares / shares.sum(1, keepdim=True)
