"""kNN-LM (arXiv 1911.00172), a baseline: a language model mixed with the tokens that followed similar hidden states.

A datastore holds keys k (n, d), the hidden states of a host over texts, and values v (n,), the tokens that followed
them. With f (d,) the state of a token and N the nearest keys (equations 2 and 3, with a temperature T, 1 in the paper):

    p_kNN(y) ∝ Σ_{i ∈ N, v_i = y} exp(−|f − k_i|² / T)
    p(y) = λ p_kNN(y) + (1 − λ) p_LM(y)

Departures from the paper: the search is exact, and a state is the last one of the host, not the input of its last
feed-forward. Nothing is trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from mmattn.errors import ConfigError, NonFiniteError, ShapeError, check_float, check_int

#: Distances held at a time, queries × keys.
_AT_ONCE = 1 << 24


def knn_log_probs(
    keys: Tensor,
    values: Tensor,
    queries: Tensor,
    logits: Tensor,
    *,
    top_k: int = 1024,
    temperature: float = 1.0,
    weight: float = 0.25,
) -> Tensor:
    """Return log-probabilities (b, l, v) of the next token: those of the host mixed with those of the datastore.

    Args:
        keys: (n, d) on any device, from `next_token_states`. With n = 0 the host's probabilities are returned.
        values: (n,) ints below v, the tokens that followed the keys.
        queries: (b, l, d) states of the tokens, `output.hidden_states[-1]`.
        logits: (b, l, v) of the same tokens.
        top_k: number of nearest keys.
        temperature: T, above 0.
        weight: λ, from 0 to below 1.

    Gradients reach the logits only.

    Raises:
        ShapeError: sizes that do not fit.
        ConfigError: numbers out of bounds.
        NonFiniteError: NaN or infinity in a key.

    >>> keys, values = torch.tensor([[0.0], [1.0], [9.0]]), torch.tensor([2, 2, 0])
    >>> mixed = knn_log_probs(keys, values, torch.zeros(1, 1, 1), torch.zeros(1, 1, 4), top_k=2, weight=0.5)
    >>> mixed.exp()
    tensor([[[0.1250, 0.1250, 0.6250, 0.1250]]])
    """
    if keys.dim() != 2 or values.shape != keys.shape[:1]:
        raise ShapeError(f"keys must be (n, d) and values (n,), got {tuple(keys.shape)} and {tuple(values.shape)}")
    check_int("top_k", top_k)
    if check_float("temperature", temperature, at_least=0) == 0:
        raise ConfigError("temperature must be above 0, got 0; with top_k=1 only the nearest key votes")
    check_float("weight", weight, at_least=0, below=1)
    if queries.dim() != 3 or logits.dim() != 3 or queries.shape[:2] != logits.shape[:2]:
        raise ShapeError(
            f"queries must be (b, l, d) and logits (b, l, v) of the same tokens, got {tuple(queries.shape)} and "
            f"{tuple(logits.shape)}"
        )
    if queries.shape[2] != keys.shape[1]:
        raise ShapeError(
            f"keys have width {keys.shape[1]} and queries {queries.shape[2]}: collect the keys with the same host"
        )
    wide = torch.promote_types(logits.dtype, torch.float32)
    log_probs = logits.to(wide).log_softmax(-1)
    if not len(keys):
        return log_probs
    with torch.no_grad():
        if int(values.max()) >= logits.shape[2] or int(values.min()) < 0:
            raise ShapeError(
                f"values must be ids from 0 to v - 1 = {logits.shape[2] - 1}, got {int(values.min())} to "
                f"{int(values.max())}: the datastore is of another vocabulary"
            )
        distances, places = nearest(keys, queries.flatten(0, 1), top_k)
        votes = -distances.to(wide) / temperature
        votes = (votes - votes.logsumexp(-1, keepdim=True)).exp()
        tokens = values.to(places.device)[places].to(logits.device)
        knn = torch.zeros_like(log_probs).flatten(0, 1)
        knn = knn.scatter_add_(1, tokens, votes.to(knn.device)).view_as(log_probs)
    rest = torch.tensor(1 - weight, dtype=wide).log().to(log_probs.device)
    return torch.logaddexp((weight * knn).log(), log_probs + rest)


def nearest(keys: Tensor, queries: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return the squared distances (q, k) to the nearest of keys (n, d), nearest first, and their rows (q, k); k ≤ n.

    The search is exact, in float32 at least. Keys are centred, so that what all states share costs no digits.

    >>> nearest(torch.tensor([[0.0], [3.0], [5.0]]), torch.tensor([[4.5]]), top_k=2)
    (tensor([[0.2500, 2.2500]]), tensor([[2, 1]]))
    """
    wide = torch.promote_types(queries.dtype, torch.float32)
    centre = keys.mean(0, dtype=wide).to(queries.device)
    if not torch.isfinite(centre).all():
        row = int((~torch.isfinite(keys).all(1)).int().argmax())
        raise NonFiniteError(
            f"key {row} of the datastore is not finite: leave its text out, or collect the states in float32"
        )
    queries = queries.to(wide) - centre
    distances, places = queries.new_empty(len(queries), 0), queries.new_empty(len(queries), 0, dtype=torch.long)
    step = max(_AT_ONCE // max(len(queries), 1), 1)
    for begin in range(0, len(keys), step):
        block = keys[begin : begin + step].to(queries.device, wide) - centre
        size = block.square().sum(1) - 2 * queries @ block.T
        place = torch.arange(begin, begin + len(block), device=queries.device).expand(size.shape)
        distances, places = torch.cat([distances, size], 1), torch.cat([places, place], 1)
        distances, best = distances.topk(min(top_k, distances.shape[1]), largest=False)
        places = places.gather(1, best)
    return (distances + queries.square().sum(1, keepdim=True)).clamp(min=0), places


@torch.no_grad()
def next_token_states(host: nn.Module, batches: Iterable[Mapping[str, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the datastore of texts: keys (n, d), the last hidden state of each token, and values (n,), the next token.

    The result is on the CPU, in the dtype of the hidden states.

    Args:
        host: a causal language model of transformers, with or without adapters, in eval mode.
        batches: keyword arguments of the host: `input_ids` (b, l), and `attention_mask` (b, l) where there is padding.
            Only real tokens that are followed by a real one count.

    Raises:
        ConfigError: the host is in training mode, or there is no batch.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> lm = LlamaForCausalLM(LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    ...                                   num_attention_heads=4)).eval()
    >>> keys, values = next_token_states(lm, [{"input_ids": torch.tensor([[5, 6, 7]])}])
    >>> keys.shape, values
    (torch.Size([2, 32]), tensor([6, 7]))
    """
    if host.training:
        raise ConfigError("the states of a host in training mode change with its dropout: call host.eval() first")
    keys, values = [], []
    for batch in batches:
        ids, mask = batch["input_ids"], batch.get("attention_mask")
        states = host(**batch, output_hidden_states=True, use_cache=False, return_dict=True).hidden_states[-1]
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        both = real[:, :-1] & real[:, 1:]
        keys.append(states[:, :-1][both.to(states.device)].cpu())
        values.append(ids[:, 1:][both].cpu())
    if not keys:
        raise ConfigError("a datastore needs at least one batch of texts, got none")
    return torch.cat(keys), torch.cat(values)
