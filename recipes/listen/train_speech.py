"""A recogniser of spoken numbers, frozen, and an adapter that reads a sensor of the voice without the noise."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

import mmattn
from mmattn import training
from mmattn.encoders import LogMelEncoder

from .learning import Lesson, make_adapter, plot_losses
from .measure import CLEAN, Measure, draw_voices
from .recogniser import Recogniser, SensorEncoder, feel, text_loss
from .settings import Config
from .speech import Heard, Speech, Utterance
from .voices import WORDS, speak

Row = tuple[Utterance, float]
"""Who says what, and how loud against the noise, in dB."""
#: Rows of the picture.
SHOWN = (
    "audio only", "audio and sensor", "audio and another utterance's sensor", "audio, LoRA without a sensor",
)  # fmt: skip


class Listening(Lesson):
    """One run: the voices, the recogniser, the adapter and its controls."""

    def __init__(self, config: Config, run: training.RunFolder, accelerator: Any) -> None:
        super().__init__(config, run, accelerator)
        spoken = speak(config.voices, config.progress)
        settings = config.recogniser
        rate, step = config.voices.sampling_rate, 2 * settings.hop
        given: dict[str, Any] = {"frames_per_token": 1, "sampling_rate": rate}
        ear = LogMelEncoder(settings.bands, window=settings.window, hop=settings.hop, normalization="mean_std", **given)
        sensor = LogMelEncoder(config.sensor.bands, window=step, hop=step, **given)
        self.speech, held_out = (
            Speech(spoken[name], spoken["chatter"], config.voices, config.noise, ear, sensor, accelerator.device)
            for name in ("train", "held_out")
        )
        # Two more than are ever said, so that words which are not there are counted.
        self.longest = config.voices.most + 2
        self.measure = Measure(held_out, config)
        torch.manual_seed(config.seed)
        frames = self.speech.batch([Utterance(0, (0,))], [0.0], [0]).energies.shape[2]
        self.recogniser = Recogniser(settings, frames).to(accelerator.device)
        self.encoder = SensorEncoder(config.sensor.encoder, config.sensor.bands).to(accelerator.device)

    def table(self) -> dict[str, Any]:
        """Every row of the table, and the word error rates of each voice."""
        config, recogniser, sensor = self.config, self.recogniser, self.config.sensor
        seconds = None
        if config.recogniser.saved is None:
            seconds = self.train(recogniser, self.first_loss, self.louder, config.recogniser, "recogniser")
            recogniser.save(self.run.path / "recogniser")
        else:
            recogniser.load(Path(config.recogniser.saved))
        recogniser.requires_grad_(False).eval()
        self.train(self.encoder, self.encoder_loss, self.in_noise, sensor.encoder, "encoder of the sensor")
        self.encoder.requires_grad_(False).eval()
        save_file(self.encoder.state_dict(), self.run.path / "sensor.safetensors")
        self.least = self.calibrate()
        rows = [{**self.row("audio only"), "parameters": size(recogniser), "seconds": seconds}]
        torch.manual_seed(config.seed)
        # Two vectors of the recogniser's width, and two numbers: see `Recogniser.sense`.
        adapter = make_adapter(sensor.adapter, 2 * config.recogniser.width + 2)
        model = mmattn.attach(recogniser.model, adapter, "sensor")
        parameters = size(model.adapter("sensor"))
        seconds = self.train(model, self.sensor_loss, self.in_noise, sensor.optim, "adapter")
        model.save_adapter(self.run.path / "adapter", "sensor")
        rows.append({**self.row("audio and sensor", sensor=True), "parameters": parameters, "seconds": seconds})
        rows.append(self.row("audio and another utterance's sensor", sensor=True, shift=1))
        rows.append(self.row("audio, the adapter without a sensor"))
        rows.append(self.row("sensor alone, read off its encoder", alone=True))
        model.delete_adapter("sensor")
        if config.controls:
            torch.manual_seed(config.seed)
            lora = training.matched_lora(model.host, parameters)
            seconds = self.train(lora, self.plain_loss, self.in_noise, sensor.optim, "LoRA")
            count = size(lora, trained=True)
            rows.append({**self.row("audio, LoRA without a sensor"), "parameters": count, "seconds": seconds})
            lora.unload()
        plot_losses(self.run)
        voices = {row["name"]: row.pop("voices") for row in rows}
        draw_voices({name: voices[name] for name in SHOWN if name in voices}, self.run.path / "voices.png")
        self.samples(rows)
        return {"rows": rows, "voices": voices, "held_out": len(self.measure.asked), "least": self.least}

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
        heard, read, said = self.batch(rows, seeds)
        return self.recogniser(heard.energies, heard.spoken, read, said), int((said >= 0).sum())

    def encoder_loss(self, rows: Sequence[Row], seeds: Sequence[int]) -> tuple[Tensor, int]:
        """The loss of the encoder of the sensor: which word is spoken at each place."""
        utterances = [utterance for utterance, _ in rows]
        said = [self.speech.said(one, np.random.default_rng(seed)) for one, seed in zip(utterances, seeds, strict=True)]
        sensed, spoken = self.speech.feel(utterances, said)
        logits = self.encoder(sensed.transpose(1, 2))
        return F.cross_entropy(logits, spoken, reduction="sum"), spoken.numel()

    def plain_loss(self, rows: Sequence[Row], seeds: Sequence[int]) -> tuple[Tensor, int]:
        """The loss of what was put on the recogniser, without a sensor."""
        heard, read, said = self.batch(rows, seeds)
        memory = {"audio": self.recogniser.hear(heard.energies)}
        return text_loss(self.recogniser.model(input_ids=read, memory=memory).logits, said), int((said >= 0).sum())

    def sensor_loss(self, rows: Sequence[Row], seeds: Sequence[int]) -> tuple[Tensor, int]:
        """The loss with a sensor, which for some of the rows was at another utterance."""
        heard, read, said = self.batch(rows, seeds)
        sensed, wrong = heard.sensed.clone(), round(self.config.sensor.wrong * len(rows))
        # Rows are drawn at random: the first ones are as good as any.
        sensed[:wrong] = heard.sensed[:wrong].roll(1, 0)
        memory = {
            "audio": self.recogniser.hear(heard.energies),
            "sensor": self.recogniser.sense(feel(self.encoder, sensed), heard.energies, self.least),
        }
        return text_loss(self.recogniser.model(input_ids=read, memory=memory).logits, said), int((said >= 0).sum())

    def batch(self, rows: Sequence[Row], seeds: Sequence[int]) -> tuple[Heard, Tensor, Tensor]:
        """What is heard and sensed of rows, what the language model reads, and what it is to say."""
        utterances, levels = zip(*rows, strict=True)
        return self.speech.batch(utterances, levels, seeds), *self.speech.texts(utterances)

    def calibrate(self) -> float:
        """The agreement that all but a few streams of another utterance stay below, for speakers of the training."""
        sensor, random = self.config.sensor, Random(f"{self.config.seed} calibration")
        found = []
        for start in range(0, sensor.calibration, 100):
            count = max(2, min(100, sensor.calibration - start))
            rows = [self.in_noise(random, 1.0) for _ in range(count)]
            heard, _, _ = self.batch(rows, [random.randrange(2**31) for _ in rows])
            found.append(self.recogniser.agree(feel(self.encoder, heard.sensed.roll(1, 0)), heard.energies)[1])
        return float(torch.cat(found).quantile(1 - sensor.passing))

    def row(self, name: str, sensor: bool = False, shift: int = 0, alone: bool = False) -> dict[str, Any]:
        """The word error rates, of all voices and of each at the noise that is measured."""
        given: dict[str, Any] = {"longest": self.longest, "shift": shift}
        if sensor:
            given |= {"sensor": self.encoder, "least": self.least}
        if alone:
            noisy = clean = self.measure.read_off(self.encoder)
        else:
            noisy, clean = (
                self.measure.written(self.recogniser, snr, **given) for snr in (self.config.noise.snr, CLEAN)
            )
        rates = {"noisy": self.measure.rate(noisy), "clean": self.measure.rate(clean)}
        return {"name": name, **rates, "voices": self.measure.by_voice(noisy), "written": noisy[:20]}

    def samples(self, rows: list[dict[str, Any]]) -> None:
        """What each wrote of the first utterances, as `samples.txt`."""
        written, parts = {row["name"]: row.pop("written") for row in rows}, []
        width = max(map(len, written))
        for place, one in enumerate(self.measure.asked[:20]):
            speaker = self.measure.speech.spoken.speakers[one.speaker]
            lines = {"said": list(one.words), **{name: texts[place] for name, texts in written.items()}}
            told = [f"{name:{width}}  {' '.join([*WORDS, '?', '?'][id] for id in ids)}" for name, ids in lines.items()]
            parts.append("\n".join([f"{speaker.voice} ({speaker.speed} words a minute)", *told]))
        self.run.write_text("samples.txt", "\n\n".join(parts))


def size(module: torch.nn.Module, trained: bool = False) -> int:
    """Number of parameters, or of those that are trained."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad or not trained)
