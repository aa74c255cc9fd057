"""The question is heard and the picture seen: two memories, two adapters, one frozen language model.

The prompt says only what to do. The adapter of the sound learns first, without any answer: above its layers the state
of the prompt's last token shall be what it is there behind the question as a text. Then the adapter of the picture, in
later layers, learns the answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerBase

import mmattn
from mmattn import training

from .data import Data, prompt_template, row, train_rows
from .settings import Config
from .speech import encode_speech


def answer_spoken(
    lm: Any,
    tokenizer: PreTrainedTokenizerBase,
    data: Data,
    pictures: Mapping[str, mmattn.Memory],
    rows: list[dict[str, Any]],
    settings: Config,
    run: training.RunFolder,
) -> dict[str, Any]:
    """Train both adapters; return the content of the table, with these rows before those of the model."""
    speech, optim, texts = settings.speech, settings.optim, len(data.texts)
    device = optim.arguments(settings).device
    sounds = {
        split: encode_speech(speech, data.texts, split, Path(settings.cache)).to(device) for split in ("train", "test")
    }
    text = prompt_template(tokenizer).replace("{question}", speech.instruction)
    prompt = [tokenizer(text, add_special_tokens=False)["input_ids"]]
    layer = settings.adapter.layers[0]
    target = read_states(lm, data.prompts[:texts], layer, device)
    model = mmattn.attach(lm, mmattn.GatedAdapter(sounds["train"].dim, **speech.adapter.model_dump()), "speech")
    spoken = Spoken(model, data, sounds, pictures, layer, target)

    def train(name: str, loss: Callable[[Tensor], Tensor], count: int, steps: int) -> float:
        try:
            return train_rows(model, name, range(count), loss, settings, run, max_steps=steps, use_cache=True)
        finally:
            model.save_adapter(run.path / name, name)

    with training.cached_prompts(model, prompt) as spoken.prompts:
        rows.append(spoken.row("frozen model, neither", None, None))
        seconds = train("speech", spoken.hearing_loss, sounds["train"].batch, speech.max_steps)
        heard = spoken.share_heard()
    parameters = model.trainable_parameters()[0]
    model.adapter("speech").requires_grad_(False)
    mmattn.attach(lm, mmattn.GatedAdapter(pictures["train"].dim, **settings.adapter.model_dump()), "picture")
    parameters += model.trainable_parameters()[0]
    with training.cached_prompts(model, prompt) as spoken.prompts:
        seconds += train("picture", spoken.answer_loss, len(data.train), optim.max_steps)
        rows += [one | {"parameters": parameters, "seconds": seconds} for one in spoken.rows(settings.seed)]
    voices = {split: sounds[split].batch // texts for split in sounds}
    content = {"seed": settings.seed, "test_questions": len(data.test), "voices": voices}
    return content | {"heard": heard, "probe": spoken.probe(), "rows": rows}


@torch.no_grad()
def read_states(lm: Any, prompts: Sequence[Sequence[int]], layer: int, device: torch.device) -> Tensor:
    """Return the state (n, d) behind a layer of the last token of each prompt."""
    batch = training.collate(prompts).to(device)
    assert batch.attention_mask is not None
    output = lm.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, output_hidden_states=True)
    states: Tensor = output.hidden_states[layer + 1]
    return states[torch.arange(len(prompts)), batch.attention_mask.sum(1) - 1]


@dataclass
class Spoken:
    """A model, its memories by split, and the states (n, d) behind a layer of questions as texts.

    Sounds are those of all texts in the first voice, then in the second, and so on.
    """

    model: Any
    data: Data
    sounds: Mapping[str, mmattn.Memory]
    pictures: Mapping[str, mmattn.Memory]
    layer: int
    target: Tensor
    prompts: training.PromptCache = field(init=False)

    def call(self, split: str, sounds: Tensor | None, pictures: Tensor | None, **options: Any) -> Any:
        """Return the output of the model, which hears sounds (b,) and sees pictures (b,) of these numbers."""
        memory = {} if sounds is None else {"speech": self.sounds[split][sounds]}
        if pictures is not None:
            memory["picture"] = self.pictures[split][pictures]
        prompts = self.prompts[[0] * max((one.batch for one in memory.values()), default=1)]
        return self.model(**prompts, memory=memory or None, **options)

    def states(self, split: str, sounds: Tensor) -> Tensor:
        """Return the states (b, d) behind the layer of the prompt's last token, standardised as the texts are."""
        states: Tensor = self.call(split, sounds, None, output_hidden_states=True).hidden_states[self.layer + 1]
        return self.standardise(states[:, -1])

    def standardise(self, states: Tensor) -> Tensor:
        """Subtract the mean of each channel over the texts and divide by its spread."""
        smallest = 0.01 * float(self.target.square().mean().sqrt())
        return (states - self.target.mean(0)) / self.target.std(0).clamp(min=smallest)

    def texts(self, split: str) -> Tensor:
        """Return the number of the text of each sound."""
        return torch.arange(self.sounds[split].batch) % len(self.data.texts)

    def hearing_loss(self, rows: Tensor) -> Tensor:
        """Return how far the states of sounds are from those of their texts."""
        wanted = self.standardise(self.target)[self.texts("train")[rows.cpu()]]
        return F.smooth_l1_loss(self.states("train", rows), wanted)

    @torch.no_grad()
    def share_heard(self) -> float:
        """Return the share of the test's sounds whose state is nearest to that of their own text, of all texts."""
        texts = self.texts("test")
        states = torch.cat([self.states("test", rows) for rows in torch.arange(len(texts)).split(128)])
        nearest = torch.cdist(states, self.standardise(self.target)).argmin(1).cpu()
        return (nearest == texts).float().mean().item()

    def answer_loss(self, rows: Tensor) -> Tensor:
        """Return the loss of the first token of answers, each question in a random voice."""
        questions, chosen, texts = self.data.train, rows.cpu(), len(self.data.texts)
        voices = torch.randint(self.sounds["train"].batch // texts, (len(rows),))
        logits = self.call("train", voices * texts + questions.text[chosen], questions.picture[chosen]).logits
        target = self.data.tokens[questions.answer[chosen]].to(logits.device)
        return F.cross_entropy(logits[:, -1].float(), target)

    @torch.no_grad()
    def row(self, name: str, sounds: Tensor | None, pictures: Tensor | None) -> dict[str, Any]:
        """Return a row of the table: answers to all test questions."""
        tokens = []
        for rows in torch.arange(len(self.data.test)).split(128):
            chosen = (None if numbers is None else numbers[rows] for numbers in (sounds, pictures))
            tokens.append(self.call("test", *chosen).logits[:, -1].argmax(-1).cpu().expand(len(rows)))
        return row(self.data, name, torch.cat(tokens))

    def rows(self, seed: int) -> list[dict[str, Any]]:
        """Return the rows of the model: each memory right, of another question, or missing; voices take turns."""
        questions, random = self.data.test, torch.Generator().manual_seed(seed)
        texts, count = len(self.data.texts), len(questions)
        voices = torch.arange(count) % (self.sounds["test"].batch // texts)
        sounds, pictures = voices * texts + questions.text, questions.picture
        other, another = (torch.randperm(count, generator=random) for _ in range(2))
        return [
            self.row("adapters, neither", None, None),
            self.row("adapters, heard only", sounds, None),
            self.row("adapters, seen only", None, pictures),
            self.row("adapters, both shuffled", sounds[other], pictures[another]),
            self.row("adapters, sounds shuffled", sounds[other], pictures),
            self.row("adapters, pictures shuffled", sounds, pictures[another]),
            self.row("adapters, both right", sounds, pictures),
        ]

    def probe(self) -> float:
        """Return the share of the test's sounds whose text a linear layer tells from the mean of Whisper's states."""
        means = {}
        for split, sounds in self.sounds.items():
            real = sounds.real_slots()[..., None]
            means[split] = (sounds.tokens * real).sum(1) / real.sum(1)
        mean, spread = means["train"].mean(0), means["train"].std(0)
        train, test = ((means[split] - mean) / spread for split in ("train", "test"))
        linear = torch.nn.Linear(train.shape[1], len(self.data.texts)).to(train.device)
        optimizer = torch.optim.AdamW(linear.parameters(), lr=1e-3, weight_decay=0.1)
        for _ in range(300):
            optimizer.zero_grad()
            F.cross_entropy(linear(train), self.texts("train").to(train.device)).backward()
            optimizer.step()
        return (linear(test).argmax(1).cpu() == self.texts("test")).float().mean().item()
