"""Caches of another model, mapped in closed form: accuracy and cost for five pairs of models.

    python -m recipes.benchmarks.carried_caches [--seeds 0 1 2]

Small Llamas are trained here to answer questions about facts ("kaBmiD…", "mi" is "D").
"""

from __future__ import annotations

import argparse
import string
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import mmattn
from recipes.benchmarks.__main__ import table
from recipes.benchmarks.timing import Rows

KEYS = [a + b for a in "bdfg" for b in "aei"]
VALUES = list(string.ascii_uppercase[:8])
FACTS, QUESTIONS = 8, 16
SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4}


def tokenizer_of(pattern: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are the matches of a pattern."""
    words = sorted({*KEYS, *"".join(KEYS), *VALUES})
    inner = Tokenizer(WordLevel({word: number for number, word in enumerate(["<pad>", *words])}, unk_token="<pad>"))
    inner.pre_tokenizer = Split(Regex(pattern), "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", clean_up_tokenization_spaces=False)


#: Keys are one token, or two.
BY_KEY, BY_LETTER = tokenizer_of("[a-z]{2}|."), tokenizer_of(".")


#: Tokenizer, task and sizes of each model: facts are looked up in all but one, which tells the last value.
MODELS: dict[str, tuple[Any, bool, dict[str, int]]] = {
    "host": (BY_KEY, False, {}),
    "equal": (BY_KEY, False, {}),
    "fewer heads": (BY_KEY, False, {"num_key_value_heads": 1}),
    "fewer layers": (BY_KEY, False, {"num_hidden_layers": 2, "num_key_value_heads": 2}),
    "another tokenizer": (BY_LETTER, False, {}),
    "another task": (BY_KEY, True, {}),
}


def texts(rows: int, generator: torch.Generator, last: bool = False, count: int = FACTS) -> list[tuple[str, str]]:
    """Return facts ("kaBmiD"), and questions with answers ("miD"); `last` asks for the last value."""
    drawn = []
    for _ in range(rows):
        keys = torch.randperm(len(KEYS), generator=generator)[:count].tolist()
        values = torch.randint(len(VALUES), (count,), generator=generator).tolist()
        questions = [one for _ in range(2) for one in torch.randperm(count, generator=generator).tolist()]
        facts = "".join(KEYS[key] + VALUES[value] for key, value in zip(keys, values, strict=True))
        answers = [VALUES[values[-1 if last else one]] for one in questions]
        drawn.append((facts, "".join(KEYS[keys[a]] + b for a, b in zip(questions, answers, strict=True))))
    return drawn


def ids_of(tokenizer: Any, rows: list[str]) -> Tensor:
    return torch.tensor(tokenizer(rows, add_special_tokens=False)["input_ids"])


def train(tokenizer: Any, seed: int, last: bool = False, steps: int = 3000, **sizes: int) -> LlamaForCausalLM:
    """Train a small Llama to answer questions about the facts before them.

    A further loss has the states after the first layer tell the two tokens before, which thousands of steps would find
    by themselves.
    """
    torch.manual_seed(seed)
    options = {"intermediate_size": 64, "initializer_range": 0.1, "max_position_embeddings": 2048}
    lm = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **(options | SIZES | sizes))).train()
    tells = torch.nn.Linear(lm.config.hidden_size, 2 * len(tokenizer))
    optimizer = torch.optim.AdamW([*lm.parameters(), *tells.parameters()], lr=2e-3, weight_decay=0.01)
    generator, mean = torch.Generator().manual_seed(1000 + seed), 1.0
    for _ in range(steps):
        rows = texts(32, generator, last)
        ids = ids_of(tokenizer, [facts + questions for facts, questions in rows])
        begin = len(tokenizer(rows[0][0])["input_ids"])
        each = (ids.shape[1] - begin) // QUESTIONS
        labels = torch.full_like(ids, -100)
        labels[:, begin + each - 1 :: each] = ids[:, begin + each - 1 :: each]
        out = lm(ids, labels=labels, output_hidden_states=True)
        before = tells(out.hidden_states[1]).chunk(2, -1)
        further = sum(
            F.cross_entropy(one[:, n:].flatten(0, 1), ids[:, :-n].flatten()) for n, one in enumerate(before, 1)
        )
        (out.loss + (0.0 if last else 0.2 * further)).backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = 0.95 * mean + 0.05 * out.loss.item()
        if mean < 0.01:
            break
    return lm.eval().requires_grad_(False)


@torch.no_grad()
def accuracy(
    model: Any,
    memory: object = None,
    *,
    rows: list[tuple[str, str]],
    tokenizer: Any = BY_KEY,
    facts: bool = True,
) -> float:
    """Return the share of answers that are right, with the facts in the prompt or without."""
    prompts, questions = ids_of(tokenizer, [one for one, _ in rows]), ids_of(tokenizer, [one for _, one in rows])
    ids = torch.cat([prompts, questions], 1) if facts else questions
    logits = model(ids, **({} if memory is None else {"memory": memory})).logits[:, -questions.shape[1] :].argmax(-1)
    each = questions.shape[1] // QUESTIONS
    logits, questions = (one[:, : each * FACTS] for one in (logits, questions))
    right = logits[:, each - 2 :: each] == questions[:, each - 1 :: each]
    return right.float().mean().item()


def controls(model: Any, score: Callable[[Any], float], memory: Any) -> dict[str, float]:
    """Return the accuracy of control caches: another prompt's, the mean of all, and through a random map."""
    other = replace(memory, states=tuple(one.roll(1, 0) for one in memory.states), ids=None)
    mean = replace(memory, states=tuple(one.mean((0, 1), keepdim=True).expand_as(one) for one in memory.states))
    rows = {"another prompt's": score(other), "mean cache": score(mean)}
    adapter = model.adapter("default")
    fitted = {name: one.clone() for name, one in adapter.state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    for block in adapter.blocks.values():
        block.weight.copy_(block.weight[torch.randperm(len(block.weight), generator=generator)])
    rows["random map"] = score(memory)
    adapter.load_state_dict(fitted)
    return rows


def carried(
    host: Any, other: mmattn.AugmentingModel, prompts: Tensor, tests: Tensor, score: Callable[..., float]
) -> dict[str, float]:
    """Fit the map of a pair; return its accuracy, and that of each control."""
    model = mmattn.attach(host, mmattn.adapters.FusedCacheAdapter(memory_dim=other.cache_dim, fuser="ridge"))
    begin = time.perf_counter()
    cosine = model.adapter("default").fit(model, other, prompts, min_cosine=-1.0)
    row = {"fit, s": time.perf_counter() - begin, "cosine": cosine, "own": score(model)}
    memory = other.prefill(tests)
    row["mapped"] = score(model, memory)
    row["retention"] = row["mapped"] / row["own"]
    row |= controls(model, partial(score, model), memory)
    model.unload()
    return row


def trained(name: str, seed: int, folder: Path) -> LlamaForCausalLM:
    """Return a small Llama of `MODELS`, trained once; again from another seed if it answers less than nine in ten."""
    path, (tokenizer, last, sizes) = folder / f"{name}-{seed}", MODELS[name]
    if not path.exists():
        number = 10 * seed + list(MODELS).index(name)
        rows = texts(64, torch.Generator().manual_seed(number), last)
        while accuracy(lm := train(tokenizer, number, last, **sizes), rows=rows, tokenizer=tokenizer) < 0.9:
            number += 100
            print(f"{name}, seed {seed}: not learned, trained again", flush=True)
        lm.save_pretrained(path)
    return LlamaForCausalLM.from_pretrained(path).eval()


def small_pairs(seed: int, folder: Path) -> Rows:
    """Return the rows of the pairs that are trained here."""
    host, generator = trained("host", seed, folder), torch.Generator().manual_seed(77 + seed)
    prompts, tests = texts(500, generator), texts(256, generator)
    ids, held = (ids_of(BY_KEY, [facts for facts, _ in one]) for one in (prompts, tests))
    rows = {}
    for name in list(MODELS)[1:]:
        tokenizer, lm = MODELS[name][0], trained(name, seed, folder)
        other = mmattn.AugmentingModel(lm, None if tokenizer is BY_KEY else (BY_KEY, tokenizer))
        rows[name] = carried(host, other, ids, held, partial(accuracy, rows=tests))
        rows[name]["no facts"] = accuracy(host, rows=tests, facts=False)
        rows[name]["the other's own"] = accuracy(lm, rows=tests, tokenizer=tokenizer)
    return rows


def spearman(rows: Rows) -> float:
    """Return the rank correlation of cosine and retention."""
    ranks = torch.tensor([[row["cosine"], row["retention"]] for row in rows.values()]).argsort(0).argsort(0)
    return torch.corrcoef(ranks.double().T)[0, 1].item()


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m recipes.benchmarks.carried_caches", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/carried_caches"), help="of the models, trained once")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    options = parser.parse_args()
    small, rows = [], {}
    for seed in options.seeds:
        small.append(small_pairs(seed, options.folder))
        rows |= {f"{name}, {seed}": row for name, row in small[-1].items()}
        print(table(f"seed {seed}", small[-1]), f"\nSpearman {spearman(small[-1]):.2f}\n", flush=True)
    mean = {
        name: {key: sum(one[name][key] for one in small) / len(small) for key in row} for name, row in small[0].items()
    }
    print(table("mean", mean), flush=True)
    print(f"\nSpearman of cosine and retention over {len(rows)} pairs: {spearman(rows):.2f}\n", flush=True)


if __name__ == "__main__":
    main()
