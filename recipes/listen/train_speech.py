"""A frozen recogniser of spoken numbers, and an adapter to a sensor of the voice without the noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
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
from mmattn.errors import import_extra

from .data import Clips, Speech, Utterance, log_energies
from .learning import Lesson, make_adapter
from .recogniser import Recogniser, SensorEncoder, most_likely_words, sensor_logits, text_loss
from .settings import Config
from .voices import WORDS, speak
from .whisper import WhisperRecogniser

Row = tuple[Utterance, float]
"""An utterance and its signal-to-noise ratio in dB."""
CLEAN = 30.0  # dB of a clean voice


class Listening(Lesson):
    """One run: the voices, the recogniser, the adapter and its controls."""

    def __init__(self, config: Config, run: training.RunFolder) -> None:
        super().__init__(config, run)
        import_extra("torchmetrics", "metrics")  # fail now rather than after the training
        spoken = speak(config.voices, config.progress)
        settings, device = config.recogniser, self.device
        rate, step = config.voices.sampling_rate, 2 * settings.hop
        options: dict[str, Any] = {"frames_per_token": 1, "sampling_rate": rate}
        sensor = LogMelEncoder(config.sensor.bands, window=step, hop=step, **options)
        torch.manual_seed(config.seed)
        self.recogniser: Recogniser | WhisperRecogniser
        if config.whisper is None:
            bands = LogMelEncoder(settings.bands, window=settings.window, hop=settings.hop, **options)
            ear: Callable[[list[Tensor]], Tensor] = partial(log_energies, bands)
            frames = ear([torch.zeros(round(config.noise.seconds * rate))]).shape[2]
            self.recogniser = Recogniser(settings, frames).to(device)
        else:
            self.recogniser = WhisperRecogniser(config).to(device)
            ear = self.recogniser.listen
        self.encoder = SensorEncoder(config.sensor.encoder, config.sensor.bands).to(device)
        self.speech, held_out = (
            Speech(spoken[name], spoken["chatter"], config.voices, config.noise, ear, sensor, device)
            for name in ("train", "held_out")
        )
        # Two more than in any utterance, so that surplus words are counted.
        self.longest = config.voices.most + 2
        self.measure = Measure(held_out, config)
        # Whisper's encoder takes most of the time: clips of the training are encoded once.
        random, count = Random(f"{config.seed} clips"), config.whisper.clips if config.whisper else 0
        self.pool = [(self.speech.draw(random), config.noise.snr) for _ in range(count)]
        self.encoded: dict[Row, Clips] = {}

    def table(self) -> dict[str, Any]:
        """Train all models; return every row of the table."""
        config, recogniser, sensor = self.config, self.recogniser, self.config.sensor
        first: dict[str, Any] = {"name": "audio only"}
        if isinstance(recogniser, Recogniser):
            seconds = self.train(recogniser, self.first_loss, self.louder, config.recogniser, "recogniser")
            recogniser.save(self.run.path / "recogniser")
            recogniser.requires_grad_(False).eval()
            first |= {"parameters": size(recogniser), "seconds": seconds}
        self.train(self.encoder, self.encoder_loss, self.in_noise, sensor.encoder, "encoder of the sensor")
        self.encoder.requires_grad_(False).eval()
        save_file(self.encoder.state_dict(), self.run.path / "sensor.safetensors")
        self.least = self.calibrate(recogniser) if isinstance(recogniser, Recogniser) else -1.0
        rows = [{**first, **self.row("audio only")}]
        torch.manual_seed(config.seed)
        adapter = make_adapter(sensor.adapter, recogniser.dim)
        model = recogniser.model = mmattn.attach(recogniser.model, adapter, "sensor")
        parameters = size(model.adapter("sensor"))
        seconds = self.train(model, self.sensor_loss, self.in_noise, sensor.optim, "adapter")
        model.save_adapter(self.run.path / "adapter", "sensor")
        rows.append({**self.row("audio and sensor", sensor=True), "parameters": parameters, "seconds": seconds})
        rows.append(self.row("audio and another utterance's sensor", sensor=True, shift=1))
        rows.append(self.row("audio, the adapter without a sensor"))
        rows.append(self.row("sensor alone, read off its encoder", alone=True))
        if config.whisper:
            recogniser.model = model.unload()
        else:
            model.delete_adapter("sensor")
        if config.controls:
            torch.manual_seed(config.seed)
            lora = training.matched_lora(model.host.get_decoder(), parameters)
            seconds = self.train(lora, self.plain_loss, self.in_noise, sensor.optim, "LoRA")
            count = size(lora, trained=True)
            rows.append({**self.row("audio, LoRA without a sensor"), "parameters": count, "seconds": seconds})
            lora.unload()
        self.run.plot_losses()
        self.samples(rows)
        return {"rows": rows, "held_out": len(self.measure.utterances), "least": self.least}

    def louder(self, random: Random, done: float) -> Row:
        """Draw a row for the recogniser: with little noise at first, later as in the settings."""
        noise = self.config.noise
        above = max(0.0, CLEAN - noise.easiest) * min(1.0, max(0.0, 1 - (done - 0.1) / 0.3))
        return self.speech.draw(random), random.uniform(noise.snr, noise.easiest) + above

    def in_noise(self, random: Random, done: float) -> Row:
        """Draw a row for adapter and LoRA, with the noise of the measurement."""
        if self.pool:
            return random.choice(self.pool)
        return self.speech.draw(random), self.config.noise.snr

    def first_loss(self, rows: Sequence[Row], seeds: Sequence[int]) -> Tensor:
        """Return the loss of the whole recogniser."""
        clips, ids, labels = self.batch(rows, seeds)
        assert isinstance(self.recogniser, Recogniser)
        loss: Tensor = self.recogniser(clips.energies, clips.spoken, ids, labels)
        return loss

    def encoder_loss(self, rows: Sequence[Row], seeds: Sequence[int]) -> Tensor:
        """Return the loss of the sensor encoder: the word at each place."""
        utterances = [utterance for utterance, _ in rows]
        sounds = [
            self.speech.say(one, np.random.default_rng(seed)) for one, seed in zip(utterances, seeds, strict=True)
        ]
        sensed, spoken = self.speech.sense(utterances, sounds)
        logits = self.encoder(sensed.transpose(1, 2))
        return F.cross_entropy(logits, spoken)

    def plain_loss(self, rows: Sequence[Row], seeds: Sequence[int]) -> Tensor:
        """Return the loss without a sensor."""
        clips, ids, labels = self.batch(rows, seeds)
        return text_loss(self.recogniser.logits(ids, clips.energies), labels)

    def sensor_loss(self, rows: Sequence[Row], seeds: Sequence[int]) -> Tensor:
        """Return the loss with a sensor; some rows get the sensor of another utterance."""
        clips, ids, labels = self.batch(rows, seeds)
        sensed, wrong = clips.sensed.clone(), round(self.config.sensor.wrong * len(rows))
        sensed[:wrong] = clips.sensed[:wrong].roll(1, 0)
        logits = self.recogniser.logits(ids, clips.energies, self.sense(sensed, clips.energies))
        return text_loss(logits, labels)

    def sense(self, sensed: Tensor, energies: Tensor) -> mmattn.Memory:
        """Return the memory of the sensor."""
        return self.recogniser.sense(sensor_logits(self.encoder, sensed), energies, self.least)

    def batch(self, rows: Sequence[Row], seeds: Sequence[int]) -> tuple[Clips, Tensor, Tensor]:
        """Return clips, ids and labels of rows."""
        utterances, levels = zip(*rows, strict=True)
        if not self.pool:
            return self.speech.batch(utterances, levels, seeds), *self.speech.texts(utterances)
        for (one, level), seed in zip(rows, seeds, strict=True):
            if (one, level) not in self.encoded:
                self.encoded[one, level] = self.speech.batch([one], [level], [seed])
        return join([self.encoded[row] for row in rows]), *self.speech.texts(utterances)

    def calibrate(self, recogniser: Recogniser) -> float:
        """Return the agreement that few streams of another utterance reach, for speakers of the training."""
        sensor, random = self.config.sensor, Random(f"{self.config.seed} calibration")
        agreements = []
        for start in range(0, sensor.calibration, 100):
            count = max(2, min(100, sensor.calibration - start))
            rows = [self.in_noise(random, 1.0) for _ in range(count)]
            clips, _, _ = self.batch(rows, [random.randrange(2**31) for _ in rows])
            other = sensor_logits(self.encoder, clips.sensed.roll(1, 0))
            agreements.append(recogniser.agree(other, clips.energies)[1])
        return float(torch.cat(agreements).quantile(1 - sensor.passing))

    def row(self, name: str, sensor: bool = False, shift: int = 0, alone: bool = False) -> dict[str, Any]:
        """Return the word error rates; `alone` measures the sensor without the recogniser."""
        if alone:
            noisy = clean = self.measure.transcribe_sensor(self.encoder)
        else:
            sense = self.sense if sensor else None
            noisy, clean = (
                self.measure.transcribe(self.recogniser, snr, self.longest, sense, shift)
                for snr in (self.config.noise.snr, CLEAN)
            )
        rates = {"noisy": self.measure.rate(noisy), "clean": self.measure.rate(clean)}
        return {"name": name, **rates, "written": noisy[:20]}

    def samples(self, rows: list[dict[str, Any]]) -> None:
        """Save the transcripts of the first utterances."""
        written, parts = {row["name"]: row.pop("written") for row in rows}, []
        width = max(map(len, written))
        for place, one in enumerate(self.measure.utterances[:20]):
            speaker = self.measure.speech.spoken.speakers[one.speaker]
            lines = {"said": list(one.words), **{name: rows[place] for name, rows in written.items()}}
            texts = [f"{name:{width}}  {' '.join([*WORDS, '?', '?'][id] for id in ids)}" for name, ids in lines.items()]
            parts.append("\n".join([f"{speaker.voice} ({speaker.speed} words a minute)", *texts]))
        self.run.write_text("samples.txt", "\n\n".join(parts))


class Measure:
    """The held-out utterances, each in the same noise for every row."""

    def __init__(self, speech: Speech, config: Config) -> None:
        self.speech, self.seed = speech, config.seed
        random, speakers = Random(f"{config.seed} held out"), len(speech.spoken.speakers)
        self.utterances = [speech.draw(random, row % speakers) for row in range(config.sensor.held_out)]
        self.batches = [slice(start, start + 100) for start in range(0, len(self.utterances), 100)]
        self.encoded: dict[float, Clips] = {}

    def transcribe(
        self,
        recogniser: Recogniser | WhisperRecogniser,
        snr: float,
        longest: int,
        sense: Callable[[Tensor, Tensor], mmattn.Memory] | None,
        shift: int,
    ) -> list[list[int]]:
        """Return the words for each utterance, with the sensor of the utterance `shift` further on."""
        clips, out = self.clips(snr), list[list[int]]()
        sensed = clips.sensed.roll(-shift, 0)
        for rows in self.batches:
            sensor = None if sense is None else sense(sensed[rows], clips.energies[rows])
            out += recogniser.transcribe(clips.energies[rows], longest, sensor)
        return out

    def transcribe_sensor(self, encoder: SensorEncoder) -> list[list[int]]:
        """Return the most likely words of the sensor encoder alone."""
        return most_likely_words(sensor_logits(encoder, self.clips(CLEAN).sensed))

    def clips(self, snr: float) -> Clips:
        """Return all utterances in their noise."""
        if snr not in self.encoded:
            seeds = [Random(f"{self.seed}/noise/{row}").getrandbits(63) for row in range(len(self.utterances))]
            parts = [(self.utterances[rows], seeds[rows]) for rows in self.batches]
            self.encoded[snr] = join([self.speech.batch(said, [snr] * len(said), seed) for said, seed in parts])
        return self.encoded[snr]

    def rate(self, transcripts: Sequence[Sequence[int]]) -> float:
        """Return the word error rate."""
        words = [" ".join(map(str, words)) for words in transcripts]
        references = [" ".join(map(str, one.words)) for one in self.utterances]
        return float(import_extra("torchmetrics.functional.text", "metrics").word_error_rate(words, references))


def join(clips: Sequence[Clips]) -> Clips:
    """Concatenate clips."""
    energies, spoken, sensed = zip(*((one.energies, one.spoken, one.sensed) for one in clips), strict=True)
    return Clips(torch.cat(energies), torch.cat(spoken), torch.cat(sensed))


def size(module: torch.nn.Module, trained: bool = False) -> int:
    """Count the parameters, or the trained ones."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad or not trained)
