"""Make the small language model of `assets/rag`: a byte-level BPE tokenizer and a Llama of two million parameters.

It learns the docstrings of Python's standard library, but none of the topics of its documentation, and the *form* of
questions and answers about facts: the facts it reads are put together at random (a key that is trained on, any value of
the property), so that it knows no fact. Half of the questions follow a few such facts and are answered from them, or
with "unknown".

    python assets/rag/make_lm.py --seed 0
"""

from __future__ import annotations

import argparse
import ast
import math
import platform
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, get_cosine_schedule_with_warmup

from mmattn import training
from mmattn.recipes import find_recipe, load_recipe

HERE = Path(__file__).parent
RAG = find_recipe("rag").folder
documents, facts = load_recipe(RAG, "documents"), load_recipe(RAG, "data")
END, PAD = "<|endoftext|>", "<|pad|>"
CONTEXT = 256


def questions(known: list[Any], count: int, random: Random) -> Iterator[str]:
    """Questions and answers about facts that are not so."""
    values: dict[str, list[str]] = {}
    for fact in known:
        values.setdefault(fact.property, []).append(fact.value)
    for _ in range(count):
        asked, *others = (replace(fact, value=random.choice(values[fact.property])) for fact in random.sample(known, 7))
        if random.random() < 0.5:
            yield f"{facts.prompt(asked)} {asked.value}"
            continue
        told = others[: random.randint(1, 6)]
        if random.random() < 0.8:
            told[random.randrange(len(told))] = asked
        yield f"{facts.prompt(asked, told)} {asked.value if asked in told else facts.UNKNOWN}"


def load_docstrings() -> list[str]:
    """Return the docstrings of the standard library, each once."""
    library, texts = Path(sysconfig.get_path("stdlib")), {}
    for file in sorted(library.rglob("*.py")):
        parts = set(file.relative_to(library).parts)
        if parts & {"test", "tests", "site-packages", "idlelib", "lib2to3", "pydoc_data", "__pycache__"}:
            continue
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node)
                if text and len(text) > 60:
                    texts[text] = None
    return list(texts)


def train_tokenizer(texts: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: any text goes in and comes back unchanged."""
    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END, PAD], initial_alphabet=alphabet, show_progress=False
    )
    bare.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bare, bos_token=END, eos_token=END, pad_token=PAD, model_max_length=CONTEXT
    )


def build(vocabulary: int, end: int, pad: int) -> LlamaForCausalLM:
    """Six layers of width 160, tied embeddings."""
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=160, intermediate_size=416, num_hidden_layers=6, num_attention_heads=5,
        num_key_value_heads=5, max_position_embeddings=CONTEXT, tie_word_embeddings=True, bos_token_id=end,
        eos_token_id=end, pad_token_id=pad,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@torch.no_grad()
def bits_per_byte(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> float:
    """Over texts in windows of half the context, each token with at least as much before it but the first ones."""
    bits = size = 0.0
    half = CONTEXT // 2
    for text in texts:
        ids = [tokenizer.bos_token_id, *tokenizer(text)["input_ids"]]
        size += len(text.encode())
        for start in range(0, len(ids) - 1, half):
            begin = max(0, start - half + 1)
            window = torch.tensor([ids[begin : start + half + 1]])
            labels = window.clone()
            labels[:, : start - begin + 1] = -100
            count = int((labels != -100).sum())
            bits += model(input_ids=window, labels=labels).loss.item() * count / math.log(2)
    return bits / size


CARD = """# A small language model of Python, and of questions

Llama shape, {parameters:,} parameters, byte-level BPE of {vocabulary} tokens, context {context}; stored in float16,
loaded in float32. It knows the form of questions about facts, and no fact.

- made by: `assets/rag/make_lm.py --seed {seed} --steps {steps}` in {seconds:.0f} s on {threads} CPU thread(s)
- text: the docstrings of Python {python}'s standard library (PSF licence), and questions about facts put together at
  random from names of the Unicode CLDR (Unicode licence): {tokens:,} tokens
- topics of Python's documentation, which it never read: {held:.3f} bits per byte
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--questions", type=int, default=40_000)
    parser.add_argument("--vocabulary", type=int, default=3072)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(given.seed)
    texts, topics = load_docstrings(), documents.load_topics()
    asked = list(questions(facts.load_facts()[0], given.questions, Random(given.seed)))
    tokenizer = train_tokenizer([*texts, *asked[:8000]], given.vocabulary)
    end = int(tokenizer.convert_tokens_to_ids(END))

    def stream(texts: list[str]) -> torch.Tensor:
        return torch.tensor([id for ids in tokenizer(texts)["input_ids"] for id in (end, *ids)])

    streams = [stream(texts), stream(asked)]
    print(f"{[len(one) for one in streams]} tokens", flush=True)
    model = build(len(tokenizer), end, int(tokenizer.convert_tokens_to_ids(PAD)))
    picks = torch.Generator().manual_seed(given.seed)

    groups = training.parameter_groups(model.train(), given.learning_rate, weight_decay=0.05)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98))
    schedule = get_cosine_schedule_with_warmup(optimizer, 100, given.steps)
    began = time.perf_counter()
    for step in range(given.steps):
        rows = []
        for one in streams:
            starts = torch.randint(0, len(one) - CONTEXT, (given.batch // 2, 1), generator=picks)
            rows.append(one[starts + torch.arange(CONTEXT)])
        ids = torch.cat(rows)
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == given.steps - 1:
            print(f"step {step} loss {loss.item():.3f} {time.perf_counter() - began:.0f} s", flush=True)
    seconds = time.perf_counter() - began
    reached = bits_per_byte(model.eval(), tokenizer, [text for part in topics for text in part.values()])
    model.half().save_pretrained(given.out)
    tokenizer.save_pretrained(given.out)
    text = CARD.format(
        parameters=sum(p.numel() for p in model.parameters()), vocabulary=len(tokenizer), context=CONTEXT,
        seed=given.seed, steps=given.steps, seconds=seconds, threads=given.threads,
        tokens=sum(map(len, streams)), held=reached, python=platform.python_version(),
    )  # fmt: skip
    (given.out / "README.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
