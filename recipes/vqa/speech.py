"""Spoken questions: espeak-ng says them in several voices, and the states of Whisper's encoder are their memories."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch.nn.functional as F
from datasets import Dataset
from torch import nn
from transformers import WhisperFeatureExtractor, WhisperModel

import mmattn
from mmattn import models, training
from mmattn.encoders import AudioEncoder
from mmattn.errors import ConfigError

from .settings import SpeechSettings

#: Options of espeak-ng: accent and voice, words a minute, pitch. Voices, speeds and pitches of the test are others.
VOICES = {
    "train": (
        "en-us+m1 150 40", "en-gb+f1 160 55", "en-gb-scotland+m2 170 45", "en-029+f3 140 60",
        "en-us+f4 165 50", "en-gb+m4 145 35", "en-gb-scotland+f5 155 65", "en-029+m5 175 30",
        "en-us+m6 135 50", "en-gb+Alex 180 45", "en-gb-scotland+Annie 150 50", "en-029+Diogo 160 40",
        "en-us+anika 170 60", "en-gb+max 140 55", "en-gb-scotland+Denis 165 35", "en-029+steph 155 45",
    ),
    "test": ("en-us+m3 152 47", "en-gb+f2 163 52", "en-gb-scotland+m7 147 42", "en-029+linda 158 57"),
}  # fmt: skip
SECONDS = 5  # of the longest question
STATES = 4  # of Whisper, in one slot of 80 ms


class SpeechEncoder:
    """Whisper's encoder over what espeak-ng says; a voice stands before its text: "en-us+m1 150 40|Is it red?"."""

    def __init__(self, name: str) -> None:
        folder = models.resolve(name)
        whisper, extractor = (
            WhisperModel.from_pretrained(folder),
            WhisperFeatureExtractor.from_pretrained(folder, chunk_length=SECONDS),
        )
        # Whisper fills each sound up to 30 s, of which a question needs few: shorter, it takes an eighth of the time.
        encoder, count = whisper.get_encoder(), extractor.nb_max_frames // 2
        encoder.embed_positions = nn.Embedding.from_pretrained(encoder.embed_positions.weight[:count])
        encoder.config.max_source_positions = encoder.max_source_positions = count
        self.audio = AudioEncoder(whisper, extractor)
        self.dim, self.fingerprint = self.audio.dim, f"{STATES}-{self.audio.fingerprint}"

    def __call__(self, texts: Sequence[str], /, *, batch_size: int) -> mmattn.Memory:
        with TemporaryDirectory() as folder:
            files = [say(*text.split("|"), Path(folder) / f"{row}.wav") for row, text in enumerate(texts)]
            memory = self.audio(files)
        states = [tokens[real].T for tokens, real in zip(memory.tokens, memory.real_slots(), strict=True)]
        return mmattn.Memory.pad([F.avg_pool1d(one, STATES, ceil_mode=True).T for one in states])


def say(voice: str, text: str, file: Path) -> Path:
    """Write a text that espeak-ng says."""
    if shutil.which("espeak-ng") is None:
        raise ConfigError("spoken questions need espeak-ng, which is not installed (Debian: apt-get install espeak-ng)")
    name, speed, pitch = voice.split()
    subprocess.run(["espeak-ng", "-v", name, "-s", speed, "-p", pitch, "-w", str(file), text], check=True)
    return file


def encode_speech(settings: SpeechSettings, texts: Sequence[str], split: str, folder: Path) -> mmattn.Memory:
    """Return the memory of each text in each voice of a split; encoded once, and read from the folder by later runs."""
    voices, encoder = VOICES[split][: settings.voices], SpeechEncoder(settings.encoder)
    spoken = Dataset.from_dict({"passage": [f"{voice}|{text}" for voice in voices for text in texts]})
    encoded = training.encode_dataset(spoken, folder, passages=encoder, rows_per_shard=len(texts))
    memory = training.stack_memories(encoded.with_format("torch"))
    assert memory is not None
    return mmattn.Memory(memory.tokens, memory.mask)
