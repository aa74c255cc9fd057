"""Reranking: a cross-encoder reads query and text together, and scores the pair."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mmattn.errors import ConfigError, NonFiniteError, ShapeError, TextError, check_int
from mmattn.models.loading import load_pretrained
from mmattn.tokenization import call_tokenizer, check_text, refuse_empty, text_length, tokenize, warn_cut


@dataclass(frozen=True)
class Reranked:
    """Scores and order of the texts of each query.

    Attributes:
        scores: (b, k) float32, higher is better; -inf where there is no text.
        order: (b, k) int, the places of the texts from the best to the worst, then those without a text.
    """

    scores: Tensor
    order: Tensor


class Reranker(nn.Module):
    """A frozen cross-encoder: a Hugging Face sequence classifier of one label, whose logits are the scores.

    Scores order the texts of one query; they are no probabilities.

    Args:
        name: a name or folder for `transformers.AutoModelForSequenceClassification`, with safetensors weights.
        max_length: tokens of the longest pair that is not cut; by default as the tokenizer and the positions of the
            model allow.
        device: device of the model.

    Raises:
        ConfigError: another number of labels, or a setting that is not allowed.
        AdapterFileError: nothing to load, or weights that are no safetensors or incomplete.
        NonFiniteError: NaN or infinity in the weights.
    """

    def __init__(
        self,
        name: str | os.PathLike[str],
        *,
        max_length: int | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        super().__init__()
        self.tokenizer, model = load_pretrained("AutoModelForSequenceClassification", name, "cross-encoder")
        if model.config.num_labels != 1:
            raise ConfigError(
                f"a cross-encoder gives a pair one score, and {os.fspath(name)!r} has {model.config.num_labels} labels"
            )
        self.max_length = text_length(max_length, self.tokenizer.model_max_length, model, name)
        self.model = model.requires_grad_(False).to(device or "cpu")
        self.eval()

    def train(self, mode: bool = True) -> Reranker:
        """Stay in evaluation mode, also as part of a model that trains."""
        super().train(False)
        return self

    def forward(
        self,
        queries: str | Iterable[str],
        texts: Sequence[str] | Sequence[Sequence[str | None]],
        *,
        batch_size: int = 32,
    ) -> Reranked:
        """Return scores and order of k texts for each of b queries.

        Args:
            queries: one query, or b of them.
            texts: k texts for one query, or b lists of k; None is no text.
            batch_size: pairs that the model reads at once.

        A UserWarning counts the texts that were cut to fit beside their query.

        Raises:
            TextError: naming what is no text, or a query that leaves no room.
            ShapeError: lists that do not fit.
            NonFiniteError: a score that is no number.
        """
        check_int("batch_size", batch_size)
        queries_list = check_text(queries)
        rows = [texts] if isinstance(queries, str) else list(texts)
        lengths = {len(row) if isinstance(row, (list, tuple)) else -1 for row in rows}
        if len(rows) != len(queries_list) or len(lengths) > 1 or -1 in lengths:
            raise ShapeError(f"{len(queries_list)} queries need as many lists of texts, all of one length")
        shape = (len(rows), max(lengths, default=0))
        present = torch.tensor([[text is not None for text in row] for row in rows], dtype=torch.bool).view(shape)
        places = present.nonzero().tolist()
        scores = torch.full(shape, -torch.inf)
        pairs = [(queries_list[row], rows[row][place]) for row, place in places]
        if pairs:
            scores[present] = self._scores(pairs, batch_size)
        return Reranked(scores, torch.argsort(scores, dim=1, descending=True, stable=True))

    def _scores(self, pairs: list[tuple[str, str]], batch_size: int) -> Tensor:
        queries, texts = [query for query, _ in pairs], check_text([text for _, text in pairs])
        refuse_empty([len(text.strip()) for text in texts])
        query_ids, _ = tokenize(self.tokenizer, queries)
        room = self.max_length - self.tokenizer.num_special_tokens_to_add(pair=True)
        for query, ids in zip(queries, query_ids, strict=True):
            if not 0 < len(ids) < room:
                raise TextError(
                    f"the query {query!r:.60} has {len(ids)} tokens, and from 1 to {room - 1} leave room for a text "
                    "beside it; shorten it, or raise max_length"
                )
        text_ids, _ = tokenize(self.tokenizer, texts)
        sizes = [len(query) + len(text) for query, text in zip(query_ids, text_ids, strict=True)]
        warn_cut([size > room for size in sizes], self.max_length)
        order = sorted(range(len(pairs)), key=lambda number: -sizes[number])
        scores = torch.empty(len(pairs))
        with torch.no_grad():
            for start in range(0, len(order), batch_size):
                batch = order[start : start + batch_size]
                inputs = call_tokenizer(
                    self.tokenizer,
                    [queries[number] for number in batch],
                    [texts[number] for number in batch],
                    padding=True,
                    truncation="only_second",
                    max_length=self.max_length,
                    split_special_tokens=True,
                    return_tensors="pt",
                ).to(next(self.model.parameters()).device)
                scores[batch] = self.model(**inputs).logits[:, 0].float().cpu()
        if not torch.isfinite(scores).all():
            number = int((~torch.isfinite(scores)).nonzero()[0])
            raise NonFiniteError(f"the score of {texts[number]!r:.60} is {scores[number]}; load the model in float32")
        return scores
