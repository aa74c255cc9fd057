"""A small language model, trained from scratch, that finds the last statement about a name in a text.

Its first texts repeat random words, which teaches a model of two layers and more to look for the words that followed
(induction, arXiv 2209.11895); with questions from the start that takes many times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from mmattn import pipelines, training
from mmattn.errors import AdapterFileError, ConfigError

from .data import ASK, KINDS, MOST_NAMES, PROPERTIES, STOP, World
from .settings import Config, ReaderSettings

ROUND = 64  # tokens of a text of repeated words
PAD = "<pad>"
Text = tuple[list[int], list[int]]
FOLDER = "lm"  # of a run


def load_lm(config: Config, device: torch.device) -> tuple[Any, World]:
    """Return the language model of the settings, frozen, and the world in its words."""
    try:
        lm, tokenizer = pipelines.load_language_model(config.texts.lm, device)
    except (AdapterFileError, ConfigError) as error:
        raise ConfigError(
            f"the default of texts.lm is made by mmattn train recipes/ways/config_reader.yaml: {error}"
        ) from error
    return lm.requires_grad_(False), World(tokenizer)


def train_reader(config: Config, run: training.RunFolder, device: torch.device) -> dict[str, Any]:
    """Train a language model to read, save it in the run's folder, and return its accuracy and cost."""
    if config.reader.lm is not None:
        model, tokenizer = pipelines.load_language_model(config.reader.lm, device)
        return {"rows": _rows(model, config, World(tokenizer)), "parameters": model.num_parameters()}
    settings, tokenizer = config.reader, make_tokenizer()
    world = World(tokenizer)
    model = make_reader(settings, tokenizer, config.seed).to(device)

    def loss(rows: Sequence[Text]) -> tuple[Tensor, int]:
        length = min(len(ids) for ids, _ in rows)
        ids, labels = (torch.tensor([one[:length] for one in part]) for part in zip(*rows, strict=True))
        ids, labels = ids.to(model.device), labels[:, 1:].to(model.device)
        logits = model(ids).logits[:, :-1]
        nats = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
        return nats, int((labels != -100).sum())

    fields = {"learning_rate": settings.learning_rate, "weight_decay": 0.01, "warmup_steps": 100}
    batches = _batches(config, world)
    seconds = train_batches(model, loss, batches, config, run, "reader", max_steps=settings.max_steps, **fields)
    model.save_pretrained(run.path / FOLDER)
    tokenizer.save_pretrained(run.path / FOLDER)
    rows = _rows(model.eval(), config, world)
    return {"rows": rows, "seconds": seconds, "parameters": sum(one.numel() for one in model.parameters())}


def train_batches(
    model: Any,
    loss: Callable[[Any], tuple[Tensor, int]],
    batches: Iterator[Any],
    config: Config,
    run: training.RunFolder,
    label: str,
    gate_learning_rate: float | None = None,
    **fields: Any,
) -> float:
    """Train the parameters that are not frozen on the nats of the targets, a batch per step; return the seconds.

    `fields` are fields of `TrainingArguments` that override the settings.
    """

    class BatchTrainer(training.AdapterTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
            nats, targets = loss(inputs["rows"])
            return nats / targets

    arguments = config.optim.arguments(config, per_device_train_batch_size=1, use_cache=True, **fields)
    trainer = BatchTrainer(
        model,
        arguments,
        data_collator=lambda _: {"rows": next(batches)},
        train_dataset=range(arguments.max_steps),
        gate_learning_rate=gate_learning_rate,
    )
    return run.train(trainer, label, config.progress)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each word of the texts, and names of two syllables."""
    syllables = [first + second for first, second in product("bdfgklmnprst", "aeio")]
    names = sorted(Random(0).sample([one + other for one, other in product(syllables, syllables)], MOST_NAMES))
    words = [PAD, ASK, STOP, *PROPERTIES[:KINDS], *names]
    tokenizer = Tokenizer(models.WordLevel({word: token for token, word in enumerate(words)}, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, unk_token=PAD, eos_token=STOP)


def make_reader(settings: ReaderSettings, tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """Return a Llama with random weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=settings.width, intermediate_size=2 * settings.width,
        num_hidden_layers=settings.depth, num_attention_heads=settings.heads, num_key_value_heads=settings.heads // 2,
        max_position_embeddings=4096, tie_word_embeddings=True, bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def _rows(model: Any, config: Config, world: World) -> list[dict[str, Any]]:
    """Return the accuracy of a model for each number of passages."""
    return [
        {"name": f"{count * config.texts.statements} statements", "accuracy": _right(model, config, world, count)}
        for count in range(1, config.texts.passages + 1)
    ]


@torch.no_grad()
def _right(model: Any, config: Config, world: World, passages: int) -> float:
    """Return the share of right answers about held-out names, with passages in the prompt."""
    random, right = Random(f"{config.seed} measured"), []
    for _ in range(config.texts.requests):
        one = world.draw(random, world.some_names(True), passages, config.texts.statements, config.texts.ask)
        before = [token for passage in world.passages(one) for token in passage]
        ids, labels = (torch.tensor([part], device=model.device) for part in world.questions(one.asked))
        logits = model(torch.cat([torch.tensor([before], device=model.device), ids], 1)).logits[:, len(before) : -1]
        answers = labels[:, 1:] != -100
        right += (logits.argmax(-1) == labels[:, 1:])[answers].tolist()
    return sum(right) / len(right)


def _batches(config: Config, world: World) -> Iterator[list[Text]]:
    """Yield the texts of each step: repeated words first, then longer and longer passages."""
    settings, random = config.reader, Random(f"{config.seed} reader")
    for step in range(settings.max_steps):
        share = step / settings.max_steps
        if share < 0.1 or step % 8 == 1:
            yield [_round(random, world) for _ in range(max(2, settings.tokens // ROUND))]
            continue
        most = 1 if share < 0.3 else min(4, config.texts.passages) if share < 0.5 else config.texts.passages
        count, properties = random.randint(1, most), random.choice([1, 2, KINDS]) if share < 0.3 else KINDS
        yield _readings(random, world, count, config, properties)


def _round(random: Random, world: World) -> Text:
    """Return random words over and over, with labels after the first round."""
    words = [*world.properties, *world.names]
    once = [world.ids[random.choice(words)] for _ in range(random.randint(5, ROUND // 2))]
    ids = (once * (ROUND // len(once) + 1))[:ROUND]
    return ids, [-100] * (len(once) + 1) + ids[len(once) + 1 :]


def _readings(random: Random, world: World, passages: int, config: Config, properties: int) -> list[Text]:
    """Return passages with questions after them."""
    statements = config.texts.statements
    ask = max(4, passages * statements // 3)
    count = max(2, config.reader.tokens // (4 * passages * statements + 5 * ask))
    texts = []
    for _ in range(count):
        one = world.draw(random, world.names, passages, statements, ask, properties=properties)
        before = [token for passage in world.passages(one) for token in passage]
        ids, labels = world.questions(one.asked)
        texts.append(([*before, *ids], [*[-100] * len(before), *labels]))
    return texts
