"""Numbers read aloud by the synthetic voices of espeak-ng: which voices, what they say, and the cache of what they said.

A voice is an accent of English with a variant of espeak-ng (pitch, formants, roughness), as `espeak-ng -v en-gb+f2` has
it. Eight variants are held out: no accent of theirs is trained on.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmattn import training
from mmattn.errors import ConfigError

from .settings import VoiceSettings

ACCENTS = ("en-us", "en-us-nyc", "en-gb", "en-gb-scotland", "en-gb-x-rp", "en-gb-x-gbclan", "en-gb-x-gbcwmd", "en-029")
VARIANTS = (
    "m1", "m2", "m4", "m5", "m6", "m8", "f1", "f3", "f4", "f5", "adam", "Alex", "Alicia", "Andy", "Annie", "aunty",
    "belinda", "benjamin", "boris", "david", "Denis", "edward", "Gene", "grandpa", "Henrique", "iven", "Jacky",
    "john", "Lee", "marcelo", "Mario", "Michael", "miguel", "pablo", "pedro", "quincy", "rob", "steph", "travis",
)  # fmt: skip
HELD_OUT = (
    "en-us+m3", "en-gb+f2", "en-gb-scotland+m7", "en-gb-x-rp+Andrea", "en-us-nyc+Mike", "en-029+linda",
    "en-gb-x-gbclan+victor", "en-gb-x-gbcwmd+zac",
)  # fmt: skip
WORDS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty", "thirty", "forty",
    "fifty", "sixty", "seventy", "eighty", "ninety", "hundred",
)  # fmt: skip
#: What the voices in the background say: no numbers, so that there is one answer to what was said.
CHATTER = (
    "the window over the garden was open all summer", "please bring the other chair into the kitchen",
    "nobody heard the train until it left the station", "we walked along the river and watched the boats",
    "her brother paints houses and sometimes fences", "the market closes early when it rains",
    "put the bread on the table before the soup gets cold", "they have been looking for a smaller apartment",
    "my neighbour plays the trumpet after dinner", "snow covered the hills and most of the road",
)  # fmt: skip


@dataclass(frozen=True)
class Utterance:
    """What a voice is asked to say."""

    text: str
    voice: str
    speed: int
    pitch: int


@dataclass(frozen=True)
class Spoken:
    """Utterances and their sound.

    Args:
        utterances: what was said, and by whom.
        clips: of each, its samples in −1 … 1.
    """

    utterances: list[Utterance]
    clips: list[NDArray[np.float32]]

    def __len__(self) -> int:
        return len(self.clips)

    def words(self, row: int) -> list[int]:
        """The words of an utterance, as places in `WORDS`."""
        return [WORDS.index(word) for word in self.utterances[row].text.split()]


def draw(count: int, voices: Sequence[str], settings: VoiceSettings, random: Random, chatter: bool) -> list[Utterance]:
    """Utterances of numbers, or of sentences without any, each by one of these voices."""
    out = []
    for _ in range(count):
        numbers = " ".join(random.choices(WORDS, k=random.randint(settings.least, settings.most)))
        text = random.choice(CHATTER) if chatter else numbers
        speed, pitch = random.randint(*settings.speed), random.randint(*settings.pitch)
        out.append(Utterance(text, random.choice(voices), speed, pitch))
    return out


def speak(settings: VoiceSettings, seed: int, progress: bool) -> dict[str, Spoken]:
    """The utterances "train", "held_out" and "chatter", spoken once and then read from the cache.

    Raises:
        ConfigError: espeak-ng is not installed, or does not know a voice.
    """
    random = Random(f"{seed} voices")
    known = [f"{accent}+{variant}" for accent in ACCENTS for variant in VARIANTS]
    asked = {
        "train": draw(settings.train, known, settings, random, False),
        "held_out": draw(settings.held_out, HELD_OUT, settings, random, False),
        "chatter": draw(settings.chatter, known, settings, random, True),
    }
    return {name: _cached(name, utterances, settings, progress) for name, utterances in asked.items()}


def _cached(name: str, utterances: list[Utterance], settings: VoiceSettings, progress: bool) -> Spoken:
    told = json.dumps([settings.sampling_rate, *map(asdict, utterances)])
    file = Path(settings.cache) / f"voices-{hashlib.sha256(told.encode()).hexdigest()[:24]}.npz"
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        steps = training.tracked(len(utterances), f"speaking ({name})", progress)
        clips = [say(utterances[row], settings.sampling_rate) for row in steps]
        ends = np.cumsum([len(clip) for clip in clips])
        part = file.with_suffix(".part.npz")
        np.savez(part, samples=np.concatenate([np.int16(clip * 32767) for clip in clips]), ends=ends)
        part.replace(file)
    with np.load(file) as found:
        samples, ends = found["samples"].astype(np.float32) / 32767, found["ends"]
    return Spoken(utterances, np.split(samples, ends[:-1]))


def say(utterance: Utterance, sampling_rate: int) -> NDArray[np.float32]:
    """The samples of an utterance, without the silence around it.

    Raises:
        ConfigError: espeak-ng is not installed, or does not know the voice.
    """
    program = shutil.which("espeak-ng")
    if program is None:
        raise ConfigError(
            "this part speaks its data with espeak-ng, and there is none on the path: install it (Debian: apt-get "
            "install espeak-ng), or run the other part, config_series.yaml"
        )
    options = ["-v", utterance.voice, "-s", str(utterance.speed), "-p", str(utterance.pitch), "--stdout"]
    done = subprocess.run([program, *options, utterance.text], capture_output=True, check=False)
    if done.returncode or len(done.stdout) < 1000:
        raise ConfigError(
            f"espeak-ng was asked for voice {utterance.voice!r} and gave {len(done.stdout)} bytes: "
            f"{done.stderr.decode(errors='replace').strip() or 'no reason'}; `espeak-ng --voices=variant` lists them"
        )
    # A WAV of 16 bits whose sizes are those of a stream: the header has 44 bytes, with the rate at the 24th.
    rate = int.from_bytes(done.stdout[24:28], "little")
    sound = np.frombuffer(done.stdout[44 : len(done.stdout) // 2 * 2], np.int16).astype(np.float32) / 32768
    sound = resample(sound, rate, sampling_rate)
    loud = np.flatnonzero(np.abs(sound) > 0.01 * np.abs(sound).max())
    sound = sound[loud[0] : loud[-1] + 1]
    return sound / np.abs(sound).max()


def resample(sound: NDArray[np.float32], rate: int, wanted: int) -> NDArray[np.float32]:
    """The same sound at another sampling rate: its spectrum, cut or filled up."""
    count = round(len(sound) * wanted / rate)
    spectrum = np.fft.rfft(sound)[: count // 2 + 1]
    return (np.fft.irfft(spectrum, count) * (count / len(sound))).astype(np.float32)


def voices_of(spoken: dict[str, Any]) -> dict[str, list[str]]:
    """The voices that each part was spoken by."""
    return {name: sorted({one.voice for one in part.utterances}) for name, part in spoken.items()}
