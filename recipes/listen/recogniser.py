"""The speech recogniser: convolutions over sound, and a language model that attends to their states."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import mmattn

from .data import END, START, VOCABULARY
from .learning import make_adapter
from .settings import RecogniserSettings, SensorEncoderSettings


class AudioEncoder(nn.Module):
    """Convolutions over log-mel energies, two frames to a state, with a learned vector for each place."""

    def __init__(self, settings: RecogniserSettings, frames: int) -> None:
        super().__init__()
        width, layers = settings.width, []
        for place in range(settings.convolutions):
            channels, stride = width if place else settings.bands, 2 if place == 1 else 1
            layers += [nn.Conv1d(channels, width, 5, stride, padding=2), nn.BatchNorm1d(width), nn.ReLU()]
        self.layers, self.dropout = nn.Sequential(*layers), nn.Dropout(settings.dropout)
        self.places = nn.Parameter(torch.randn((frames + 1) // 2, width) / 2)
        self.words = nn.Linear(width, VOCABULARY)

    def forward(self, energies: Tensor) -> tuple[mmattn.Memory, Tensor]:
        """Return a memory (b, frames / 2, width), and logits (b, frames / 2, v) of the word at each place."""
        states = self.dropout(self.layers(energies).transpose(1, 2))
        return mmattn.Memory(states + self.places, check_finite=False), self.words(states)


class SensorEncoder(nn.Sequential):
    """Convolutions from a sensor stream (b, c, t) to logits (b, v, t) of the word at each time."""

    def __init__(self, settings: SensorEncoderSettings, bands: int) -> None:
        layers: list[nn.Module] = []
        for place in range(settings.convolutions):
            channels = settings.width if place else bands
            layers += [nn.Conv1d(channels, settings.width, 5, padding=2), nn.BatchNorm1d(settings.width), nn.ReLU()]
        super().__init__(*layers, nn.Conv1d(settings.width, VOCABULARY, 1))


class Recogniser(nn.Module):
    """A small Llama with random weights that transcribes the memory of its adapter "audio"."""

    def __init__(self, settings: RecogniserSettings, frames: int) -> None:
        super().__init__()
        width = settings.width
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=settings.layers,
            num_attention_heads=settings.heads, num_key_value_heads=settings.heads, max_position_embeddings=64,
            tie_word_embeddings=True, bos_token_id=START, eos_token_id=END, pad_token_id=END, initializer_range=0.05,
        )  # fmt: skip
        self.ear, self.weight = AudioEncoder(settings, frames), settings.places
        self.dim = 2 * width + 2  # of the memory of a sensor
        lm = LlamaForCausalLM(config)
        self.model = mmattn.attach(lm, make_adapter(settings.adapter, width), "audio")
        # The language model is trained, too.
        lm.requires_grad_(True)

    def forward(self, energies: Tensor, spoken: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of all words and of the encoder's own logits, which teach where to attend."""
        memory, words = self.ear(energies)
        places = F.cross_entropy(words.flatten(0, 1), spoken.flatten())
        return text_loss(self.model(input_ids=ids, memory={"audio": memory}).logits, labels) + self.weight * places

    def logits(self, ids: Tensor, energies: Tensor, sensor: mmattn.Memory | None = None) -> Tensor:
        """Return the logits (b, l, v) of the words that follow `ids` (b, l)."""
        logits: Tensor = self.model(input_ids=ids, memory=self.hear(energies, sensor)).logits
        return logits

    @torch.no_grad()
    def hear(self, energies: Tensor, sensor: mmattn.Memory | None = None) -> dict[str, mmattn.Memory]:
        """Return the memories of utterances."""
        return {"audio": self.ear(energies)[0]} | ({} if sensor is None else {"sensor": sensor})

    @torch.no_grad()
    def sense(self, words: Tensor, energies: Tensor, least: float = -1.0) -> mmattn.Memory:
        """Return a memory (b, frames / 2, dim) of a sensor stream, masked below `least` agreement."""
        same, agreement = self.agree(words, energies)
        vectors = self.model.host.get_input_embeddings().weight
        places = self.ear.places.expand(len(words), -1, -1)
        overall = agreement[:, None, None].expand_as(same)
        tokens = torch.cat([words.softmax(-1) @ (vectors / vectors.std()), places, 2 * same, 2 * overall], -1)
        mask = (agreement >= least)[:, None].expand(tokens.shape[:2])
        return mmattn.Memory(tokens, mask, check_finite=False)

    @torch.no_grad()
    def agree(self, words: Tensor, energies: Tensor) -> tuple[Tensor, Tensor]:
        """Return the chance of the same word in audio and sensor (b, frames / 2, 1), and their agreement (b,)."""
        words, audio = words.softmax(-1), self.ear(energies)[1].softmax(-1)
        same = (words * audio)[..., :END].sum(-1, keepdim=True)
        silent, quiet = (chances[..., START] - chances[..., START].mean(1, keepdim=True) for chances in (words, audio))
        mean = same.sum((1, 2)) / (1 - words[..., START]).sum(1).clamp_min(1e-6)
        return same, mean + F.cosine_similarity(silent, quiet, dim=1)

    @torch.no_grad()
    def transcribe(self, energies: Tensor, longest: int, sensor: mmattn.Memory | None = None) -> list[list[int]]:
        """Return the words of each row, greedily."""
        ids = torch.full((len(energies), 1), START, device=energies.device)
        output = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            memory=self.hear(energies, sensor),
            max_new_tokens=longest,
            do_sample=False,
        )
        return [[*row, END][: [*row, END].index(END)] for row in output[:, 1:].tolist()]

    def save(self, folder: Path) -> None:
        """Write the language model, its adapter and the audio encoder into a folder."""
        self.model.host.save_pretrained(str(folder))
        self.model.save_adapter(folder / "audio", "audio")
        save_file(self.ear.state_dict(), folder / "ear.safetensors")


@torch.no_grad()
def sensor_logits(encoder: SensorEncoder, sensed: Tensor) -> Tensor:
    """Return the logits (b, t, v) of a frozen sensor encoder for its stream (b, t, c)."""
    logits: Tensor = encoder(sensed.transpose(1, 2)).transpose(1, 2)
    return logits


def most_likely_words(logits: Tensor) -> list[list[int]]:
    """Return the words of each row of logits (b, t, v), one for each run of places with the same most likely word.

    >>> most_likely_words(torch.nn.functional.one_hot(torch.tensor([[30, 4, 4, 30, 4, 7, 7, 30]]), 31))
    [[4, 4, 7]]
    """
    rows = []
    for places in logits.argmax(-1).tolist():
        runs = [word for word, before in zip(places, [START, *places], strict=False) if word != before]
        rows.append([word for word in runs if word < END])
    return rows


def text_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of labels (b, l)."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
