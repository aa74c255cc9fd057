"""A recogniser of spoken numbers, frozen, and an adapter that reads the list of words a speaker is expected to say."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor

import mmattn
from mmattn import training
from mmattn.encoders import LogMelEncoder

from .learning import Lesson, make_adapter, plot_losses
from .measure import CLEAN, Measure, draw_voices
from .recogniser import Recogniser, text_loss
from .settings import Config
from .speech import Speech, Utterance
from .voices import WORDS, speak

Row = tuple[Utterance, float]
"""Who says what, and how loud against the noise, in dB."""
#: Rows of the picture.
SHOWN = ("audio only", "audio and list", "audio and another speaker's list", "audio, LoRA without a list")


class Listening(Lesson):
    """One run: the voices, the recogniser, the adapter and its controls."""

    def __init__(self, config: Config, run: training.RunFolder, accelerator: Any) -> None:
        super().__init__(config, run, accelerator)
        spoken = speak(config.voices, config.seed, config.progress)
        settings = config.recogniser
        ear = LogMelEncoder(
            settings.bands,
            frames_per_token=1,
            sampling_rate=config.voices.sampling_rate,
            window=settings.window,
            hop=settings.hop,
            normalization="mean_std",
        )
        self.speech, held_out = (
            Speech(spoken[name], spoken["chatter"], config.voices, config.noise, ear, accelerator.device)
            for name in ("train", "held_out")
        )
        # Two more than are ever said, so that words which are not there are counted.
        self.longest = config.voices.most + 2
        self.measure = Measure(held_out, config)
        torch.manual_seed(config.seed)
        energies, _ = self.speech.batch([Utterance(0, (0,))], [0.0], [0])
        self.recogniser = Recogniser(settings, energies.shape[2]).to(accelerator.device)

    def table(self) -> dict[str, Any]:
        """Every row of the table, and the word error rates of each voice."""
        config, recogniser, expected = self.config, self.recogniser, self.config.expected
        seconds = self.train(recogniser, self.first_loss, self.louder, config.recogniser, "recogniser")
        recogniser.requires_grad_(False).eval()
        recogniser.save(self.run.path / "recogniser")
        rows = [{**self.row("audio only"), "parameters": size(recogniser), "seconds": seconds}]
        torch.manual_seed(config.seed)
        model = mmattn.attach(recogniser.model, make_adapter(expected.adapter, config.recogniser.width + 1), "list")
        parameters = size(model.adapter("list"))
        seconds = self.train(model, self.listed_loss, self.in_noise, expected.optim, "adapter")
        model.save_adapter(self.run.path / "adapter", "list")
        own, others = self.measure.lists, self.measure.lists.roll(1, 0)
        rows.append({**self.row("audio and list", own), "parameters": parameters, "seconds": seconds})
        rows.append(self.row("audio and another speaker's list", others))
        rows.append(self.row("audio, the adapter without a list"))
        rows.append(self.row("list and noise alone", own, silent=True))
        model.delete_adapter("list")
        if config.controls:
            torch.manual_seed(config.seed)
            lora = training.matched_lora(model.host, parameters)
            seconds = self.train(lora, self.plain_loss, self.in_noise, expected.optim, "LoRA")
            count = size(lora, trained=True)
            rows.append({**self.row("audio, LoRA without a list"), "parameters": count, "seconds": seconds})
            lora.unload()
        plot_losses(self.run)
        voices = {row["name"]: row.pop("voices") for row in rows}
        draw_voices({name: voices[name] for name in SHOWN if name in voices}, self.run.path / "voices.png")
        self.samples(rows)
        return {"rows": rows, "voices": voices, "held_out": len(self.measure.asked)}

    def louder(self, random: Random, done: float) -> Row:
        """What the recogniser learns: at first with hardly any noise, and as loud as the settings say later on."""
        noise = self.config.noise
        above = max(0.0, CLEAN - noise.easiest) * min(1.0, max(0.0, 1 - (done - 0.1) / 0.3))
        return self.speech.draw(random), random.uniform(noise.snr, noise.easiest) + above

    def in_noise(self, random: Random, done: float) -> Row:
        """What adapter and LoRA learn: as loud as is measured."""
        return self.speech.draw(random), self.config.noise.snr

    def first_loss(self, rows: Sequence[Row], seeds: Sequence[int]) -> tuple[Tensor, int]:
        """The loss of a recogniser that learns everything."""
        utterances, levels = zip(*rows, strict=True)
        energies, spoken = self.speech.batch(utterances, levels, seeds, step=2)
        read, said = self.speech.texts(utterances)
        return self.recogniser(energies, spoken, read, said), int((said >= 0).sum())

    def listed_loss(self, rows: Sequence[Row], seeds: Sequence[int]) -> tuple[Tensor, int]:
        """The loss with a list for each row, some of them of another speaker."""
        expected = self.config.expected
        words = self.speech.expected([utterance for utterance, _ in rows], expected.words, seeds)
        wrong = round(expected.wrong * len(rows))
        # Rows are drawn at random: the first ones are as good as any.
        words[:wrong] = words[:wrong].roll(1, 0)
        return self.plain_loss(rows, seeds, words)

    def plain_loss(
        self, rows: Sequence[Row], seeds: Sequence[int], words: Tensor | None = None
    ) -> tuple[Tensor, int]:
        """The loss of what was put on the recogniser."""
        utterances, levels = zip(*rows, strict=True)
        energies, _ = self.speech.batch(utterances, levels, seeds)
        read, said = self.speech.texts(utterances)
        logits = self.recogniser.model(input_ids=read, memory=self.recogniser.hear(energies, words)).logits
        return text_loss(logits, said), int((said >= 0).sum())

    def row(self, name: str, lists: Tensor | None = None, silent: bool = False) -> dict[str, Any]:
        """The word error rates, of all voices and of each at the noise that is measured.

        Args:
            name: of the row.
            lists: (rows, words) of expected words; None for none.
            silent: the voice is all but gone: what the list alone is worth.
        """
        snr = self.config.noise.snr
        noisy = self.measure.written(self.recogniser, -60.0 if silent else snr, self.longest, lists)
        row = {"name": name, "noisy": self.measure.rate(noisy), "clean": None}
        if not silent:
            row["clean"] = self.measure.rate(self.measure.written(self.recogniser, CLEAN, self.longest, lists))
        return {**row, "voices": self.measure.by_voice(noisy), "written": noisy[:20]}

    def samples(self, rows: list[dict[str, Any]]) -> None:
        """What each wrote of the first utterances, as `samples.txt`."""
        written, parts = {row["name"]: row.pop("written") for row in rows}, []
        width = max(map(len, written))
        for place, one in enumerate(self.measure.asked[:20]):
            speaker = self.measure.speech.spoken.speakers[one.speaker]
            lines = {f"{'said':{width}}": one.words, "the list": self.measure.lists[place].tolist()}
            lines |= {name: texts[place] for name, texts in written.items()}
            told = [f"{name:{width}}  {' '.join(WORDS[id] if id < len(WORDS) else '?' for id in ids)}" for name, ids in lines.items()]
            parts.append("\n".join([f"{speaker.voice} ({speaker.speed} words a minute)", *told]))
        self.run.write_text("samples.txt", "\n\n".join(parts))


def size(module: torch.nn.Module, trained: bool = False) -> int:
    """Number of parameters, or of those that are trained."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad or not trained)
