"""Documents in a twentieth of the slots: a prefix for each, trained on the host's answers about it (Cartridges).

A cartridge (arXiv 2506.06266, section 3) is a trained prefix that stands for a document. The host is asked about
everything in the document, with the document in its prompt; the prefix is trained for the same answers without it:
self-study, by the divergence of the two distributions of every answer. In every other step a row has two documents, and
the host both in its prompt: prefixes that were never trained beside another one do not compose.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import mmattn
from mmattn import training

from .data import Reading
from .reader import load_lm, train_batches
from .settings import Config

COLUMNS = {
    "slots": ("slots", 1, ",.0f", ""),
    "accuracy": ("right", 100, ".1f", " %"),
    "share": ("of the whole document's", 100, ".1f", " %"),
    "seconds": ("seconds for all", 1, ".0f", ""),
}
Loss = Callable[[Any, Sequence[Sequence[int]], int], tuple[Tensor, int]]


class Documents:
    """Some documents, and prefixes for them."""

    def __init__(self, config: Config, run: training.RunFolder, device: torch.device) -> None:
        self.config, self.run = config, run
        self.lm, self.world = load_lm(config, device)
        self.teacher = copy.deepcopy(self.lm)
        one, random = config.documents, Random(f"{config.seed} documents")
        # Each says each thing once; two of them say nothing about the same name.
        self.documents: list[Reading] = []
        for number in range(one.documents):
            names = self.world.names[number % 2 :: 2]
            self.documents.append(self.world.draw(random, names, 1, one.statements, one.statements, again=0.0))
        tokens = [self.world.passages(document)[0] for document in self.documents]
        self.ids = torch.tensor(tokens, device=self.lm.device)
        self.virtual_tokens = max(1, self.ids.shape[1] // one.times_fewer)

    def rows(self) -> list[dict[str, Any]]:
        """Return the share of right answers for each way to give a document."""
        every = [[number] for number in range(len(self.documents))]
        whole, slots = self.ids.shape[1], self.virtual_tokens
        pairs = [[number, number + 1] for number in range(0, len(self.documents) - 1, 2)]
        rows = [
            self.row("no document", 0, lambda rows: self.in_prompt(rows, 0), every),
            self.row("the whole document in the prompt", whole, lambda rows: self.in_prompt(rows, whole), every),
            self.row("its beginning in the prompt", slots, lambda rows: self.in_prompt(rows, slots), every),
            self.row("two whole documents in the prompt", 2 * whole, lambda rows: self.in_prompt(rows, whole), pairs),
        ]
        for name, loss in (("not trained", None), ("next token", self.next_token), ("self-study", self.self_study)):
            model = mmattn.attach(self.lm, mmattn.adapters.PrefixAdapter(slots, num_prefixes=len(self.documents)))
            self.begin(model)
            self.with_prefix(model)(pairs[:1])(self.ids[:1, :2])  # a host that cannot compose them is refused untrained
            seconds = None if loss is None else self.learn(model, name, loss)
            rows.append(self.row(f"prefix, {name}", slots, self.with_prefix(model), every))
            rows[-1]["seconds"] = seconds
            if loss is not None:
                of_another = self.with_prefix(model, shift=1)
                rows.append(self.row(f"prefix, {name}, of another document", slots, of_another, every))
                both = self.with_prefix(model)
                rows.append(self.row(f"prefixes, {name}, of two documents", 2 * slots, both, pairs))
            if loss == self.self_study:
                model.save_adapter(self.run.path / "adapter")
            model.unload()
        alone, two = rows[1]["accuracy"], rows[3]["accuracy"]
        for row in rows:
            row["share"] = row["accuracy"] / (two if "two" in row["name"] else alone)
        return rows

    def begin(self, model: Any) -> None:
        """Initialise each prefix with the keys and values of the first tokens of its document."""
        reading = mmattn.attach(self.teacher, mmattn.adapters.PassageAdapter())
        cache = mmattn.hosts.PassageCache(reading)
        cache.add([one[: self.virtual_tokens] for one in self.ids], progress=False)
        selected = cache.select([[number] for number in range(len(self.documents))])
        model.adapter("default").copy_passages(selected, reading.adapter("default"))
        reading.unload()

    def learn(self, model: Any, name: str, loss: Loss) -> float:
        """Train the prefixes, and return the seconds."""
        optim, random = self.config.optim, Random(f"{self.config.seed} {name}")

        def row(documents: int) -> list[int]:
            first = random.randrange(len(self.documents))
            # The documents of a row are about different names.
            others = [number for number in range(len(self.documents)) if number % 2 != first % 2]
            return [first, random.choice(others)][:documents]

        def batches() -> Iterator[list[tuple[list[int], int]]]:
            for step in range(optim.max_steps):
                yield [(row(1 + step % 2), step) for _ in range(optim.per_device_train_batch_size)]

        def step_loss(rows: list[tuple[list[int], int]]) -> tuple[Tensor, int]:
            return loss(model, [documents for documents, _ in rows], rows[0][1])

        return train_batches(model, step_loss, batches(), self.config, self.run, name, weight_decay=0.01)

    def next_token(self, model: Any, rows: Sequence[Sequence[int]], step: int) -> tuple[Tensor, int]:
        """Return -log p of the documents, one after the other, after their prefixes."""
        ids = self.ids[torch.tensor(rows)].flatten(1)
        logits = model(ids, memory=rows).logits[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"), ids[:, 1:].numel()

    def self_study(self, model: Any, rows: Sequence[Sequence[int]], step: int) -> tuple[Tensor, int]:
        """Return the divergence of the answers with prefixes from the host's answers with the documents."""
        random = Random(f"{self.config.seed} {step}")
        questions = [self.questions(row, random) for row in rows]
        ids, labels = (torch.tensor(part, device=self.ids.device) for part in zip(*questions, strict=True))
        answers = labels[:, 1:] != -100
        with torch.no_grad():
            target = self.in_prompt(rows, self.ids.shape[1])(ids)[:, :-1][answers].log_softmax(-1)
        output = model(ids, memory=rows).logits[:, :-1][answers].log_softmax(-1)
        return F.kl_div(output, target, reduction="sum", log_target=True), int(answers.sum())

    def questions(self, row: Sequence[int], random: Random) -> tuple[list[int], list[int]]:
        """Return some questions about the documents of a row with their answers."""
        statements = [one for number in row for one in self.documents[number].asked]
        return self.world.questions(random.sample(statements, min(self.config.texts.ask, len(statements))))

    def in_prompt(self, rows: Sequence[Sequence[int]], tokens: int) -> Callable[[Tensor], Tensor]:
        """Return a function from questions to logits, with the first tokens of each document in the prompt."""
        before = self.ids[torch.tensor(rows)][:, :, :tokens].flatten(1)
        return lambda ids: self.teacher(torch.cat([before, ids], 1)).logits[:, before.shape[1] :]

    def with_prefix(self, model: Any, shift: int = 0) -> Callable[[Any], Callable[[Tensor], Tensor]]:
        """Return the same with a prefix for each document, or with another document's prefix."""

        def logits(rows: Sequence[Sequence[int]]) -> Callable[[Tensor], Tensor]:
            memory = [[(number + shift) % len(self.documents) for number in row] for row in rows]
            return lambda ids: model(ids, memory=memory).logits

        return logits

    @torch.no_grad()
    def row(self, name: str, slots: int, logits: Any, rows: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Return the share of right answers to all questions about the documents of each row."""
        right: list[bool] = []
        every = [[one for number in row for one in self.documents[number].asked] for row in rows]
        for start in range(0, max(map(len, every)), self.config.texts.ask):
            questions = [self.world.questions(some[start : start + self.config.texts.ask]) for some in every]
            ids, labels = (torch.tensor(part, device=self.ids.device) for part in zip(*questions, strict=True))
            answers = logits(rows)(ids)[:, :-1].argmax(-1)
            targets = labels[:, 1:]
            right += (answers == targets)[targets != -100].tolist()
        return {"name": name, "slots": slots, "accuracy": sum(right) / len(right), "seconds": None}
