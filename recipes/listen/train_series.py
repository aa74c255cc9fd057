"""A frozen language model describes series of 16,000 samples with an adapter to their patches."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import mmattn
from mmattn import training
from mmattn.encoders import SeriesEncoder

from .learning import Lesson, make_adapter
from .series import ATTRIBUTES, END, START, VOCABULARY, Description, batch, make_series, parse
from .settings import Config, LanguageModelSettings

LONGEST = 16  # words of a description at most, its end included


def build(settings: LanguageModelSettings, length: int) -> LlamaForCausalLM:
    """Return a Llama with random weights for texts of this many tokens."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=settings.width, intermediate_size=8 * settings.width // 3,
        num_hidden_layers=settings.layers, num_attention_heads=settings.heads, num_key_value_heads=settings.heads,
        max_position_embeddings=length, tie_word_embeddings=True, bos_token_id=START, eos_token_id=END,
        pad_token_id=END,
    )  # fmt: skip
    return LlamaForCausalLM(config)


class Describing(Lesson):
    """One run: the series, the language model, the adapter and its controls."""

    def __init__(self, config: Config, run: training.RunFolder) -> None:
        super().__init__(config, run)
        series = config.series
        self.sense = SeriesEncoder(series.patch, position_features=series.position_features)
        self.descriptions, self.train_memory = self.read("train", series.train)
        self.held_out, self.memory = self.read("held out", series.held_out)

    def read(self, name: str, count: int) -> tuple[list[Description], mmattn.Memory]:
        """Return descriptions, and the memories of series that match them."""
        random = Random(f"{self.config.seed} {name}")
        descriptions = [Description.draw(random) for _ in range(count)]
        seeds = [Random(f"{self.config.seed}/{name}/{row}").getrandbits(63) for row in range(count)]
        rows = training.tracked(count, f"reading ({name})", self.config.progress)
        memories = [self.sense(make_series(descriptions[row], self.config.series, seeds[row])) for row in rows]
        whole = mmattn.Memory.stack(memories)
        return descriptions, mmattn.Memory(whole.tokens.half(), whole.mask)

    def table(self) -> dict[str, Any]:
        """Train the language model, the adapter and the LoRA; return every row."""
        config = self.config
        torch.manual_seed(config.seed)
        lm = build(config.lm, self.train_memory.length + LONGEST + 2).to(self.device)
        self.train(lm, self.loss(lm, None), lambda random, _: Description.draw(random), config.lm, "language model")
        lm.requires_grad_(False).eval()
        rows = [self.row("frozen LM, no series", lm, None)]
        torch.manual_seed(config.seed)
        model = mmattn.attach(lm, make_adapter(config.describing.adapter, self.sense.dim))
        parameters, _ = model.trainable_parameters()
        loss = self.loss(model, self.train_memory)
        seconds = self.train(model, loss, self.any_series, config.describing.optim, "adapter")
        model.save_adapter(self.run.path / "adapter", encoder=self.sense.fingerprint)
        trained = {"parameters": parameters, "seconds": seconds}
        rows.append({**self.row("adapter, its series", model, self.memory, samples=True), **trained})
        # Each description with the series of the next.
        order = [*range(1, self.memory.batch), 0]
        rows.append(self.row("adapter, another's series", model, self.memory[order]))
        rows.append(self.row("adapter, no series", model, None))
        model.unload()
        if config.controls:
            torch.manual_seed(config.seed)
            lora = training.matched_lora(lm, parameters)
            seconds = self.train(lora, self.loss(lora, None), self.any_series, config.describing.optim, "LoRA")
            count = sum(parameter.numel() for parameter in lora.parameters() if parameter.requires_grad)
            rows.append({**self.row("LoRA, no series", lora, None), "parameters": count, "seconds": seconds})
            lora.unload()
        self.run.plot_losses()
        return {"rows": rows, "patches": self.train_memory.length}

    def any_series(self, random: Random, done: float) -> int:
        """Return the number of a training series."""
        return random.randrange(len(self.descriptions))

    def loss(self, model: Any, memory: mmattn.Memory | None) -> Any:
        """Return the loss of descriptions, or of rows of the training series with `memory`."""

        def loss(rows: Sequence[Any], seeds: Sequence[int]) -> torch.Tensor:
            texts = [row if isinstance(row, Description) else self.descriptions[row] for row in rows]
            inputs = batch(texts, self.device)
            options = {} if memory is None else {"memory": memory[list(rows)].to(self.device).to(torch.float32)}
            return model(**inputs, **options).loss  # type: ignore[no-any-return]

        return loss

    @torch.no_grad()
    def describe(self, model: Any, memory: mmattn.Memory | None) -> list[list[int]]:
        """Return the generated ids for each row of a memory, or as many without a memory."""
        out: list[list[int]] = []
        for start in range(0, len(self.held_out), 100):
            rows = range(start, min(start + 100, len(self.held_out)))
            options = {}
            if memory is not None:
                options = {"memory": memory[slice(rows.start, rows.stop)].to(self.device).to(torch.float32)}
            ids = torch.full((len(rows), 1), START, device=self.device)
            output = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=LONGEST, do_sample=False, **options
            )
            out += output[:, 1:].tolist()
        return out

    def row(self, name: str, model: Any, memory: mmattn.Memory | None, samples: bool = False) -> dict[str, Any]:
        """Return the share of held-out series with each attribute right, and with all."""
        parsed = [parse(ids) for ids in self.describe(model, memory)]
        pairs = list(zip(parsed, self.held_out, strict=True))
        right = [
            {one: value == true.attributes()[one] for one, value in text.attributes().items()} for text, true in pairs
        ]
        if samples:
            self.texts = [" ".join(text.words()) if "?" not in vars(text).values() else "?" for text in parsed]
            lines = [
                f"true: {' '.join(true.words())}\nsaid: {text}"
                for text, true in zip(self.texts, self.held_out, strict=True)
            ]
            self.run.write_text("samples.txt", "\n\n".join(lines[:20]))
        shares = {one: sum(row[one] for row in right) / len(right) for one in ATTRIBUTES}
        return {"name": name, **shares, "all": sum(all(row.values()) for row in right) / len(right)}
