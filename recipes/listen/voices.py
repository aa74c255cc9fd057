"""Numbers spoken by the synthetic voices of espeak-ng, with a cache.

A voice is an accent of English with a variant of espeak-ng (pitch, formants, roughness), as `espeak-ng -v en-gb+f2` has
it. Eight variants are held out of all training.
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

import numpy as np
from numpy.typing import NDArray

from mmattn import training
from mmattn.errors import ConfigError

from .settings import VoiceSettings

ACCENTS = ("en-us", "en-us-nyc", "en-gb", "en-gb-scotland", "en-gb-x-rp", "en-gb-x-gbclan", "en-gb-x-gbcwmd", "en-029")
VARIANTS = (
    "m1", "m2", "m4", "m5", "m6", "m8", "f1", "f3", "f4", "f5", "adam", "Alex", "Alicia", "Andy", "anika", "Annie",
    "announcer", "antonio", "AnxiousAndy", "aunty", "belinda", "benjamin", "boris", "croak", "david", "Denis", "Diogo",
    "ed", "edward", "edward2", "Gene", "Gene2", "grandma", "grandpa", "gustave", "Henrique", "Hugo", "iven", "iven2",
    "iven3", "iven4", "Jacky", "john", "kaukovalta", "klatt", "klatt2", "klatt3", "klatt4", "klatt5", "Lee",
    "marcelo", "Marco", "Mario", "max", "Michael", "michel", "miguel", "Nguyen", "norbert", "pablo", "paul", "pedro",
    "quincy", "RicishayMax", "RicishayMax2", "rob", "robert", "sandro", "shelby", "steph", "steph2", "steph3", "Storm",
    "travis", "Tweaky",
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
#: Sentences of the voices in the background, without numbers.
CHATTER = (
    "the window over the garden was open all summer", "please bring the other chair into the kitchen",
    "nobody heard the train until it left the station", "we walked along the river and watched the boats",
    "her brother paints houses and sometimes fences", "the market closes early when it rains",
    "put the bread on the table before the soup gets cold", "they have been looking for a smaller apartment",
    "my neighbour plays the trumpet after dinner", "snow covered the hills and most of the road",
)  # fmt: skip
Sound = NDArray[np.float32]


@dataclass(frozen=True)
class Speaker:
    """A voice at a speed, in words a minute, and a pitch, from 0 to 99."""

    voice: str
    speed: int
    pitch: int


@dataclass(frozen=True)
class Spoken:
    """Speakers, and the samples of each text, from -1 to 1, by speaker."""

    speakers: list[Speaker]
    clips: list[list[Sound]]


def speak(settings: VoiceSettings, progress: bool) -> dict[str, Spoken]:
    """Return the clips of "train", "held_out" and "chatter" from the cache, the same for every seed."""
    random = Random("0 voices")
    voices = [f"{accent}+{variant}" for accent in ACCENTS for variant in VARIANTS]

    def speakers(voices: Sequence[str]) -> list[Speaker]:
        return [Speaker(voice, random.randint(*settings.speed), random.randint(*settings.pitch)) for voice in voices]

    train = speakers(random.sample(voices, settings.speakers))
    held_out = speakers(HELD_OUT * settings.held_out)
    chatter = speakers(random.sample(voices, settings.chatter))
    return {
        "train": _cached("train", train, WORDS, settings, progress),
        "held_out": _cached("held out", held_out, WORDS, settings, progress),
        "chatter": _cached("in the background", chatter, CHATTER, settings, progress),
    }


def _cached(
    name: str, speakers: list[Speaker], texts: Sequence[str], settings: VoiceSettings, progress: bool
) -> Spoken:
    contents = json.dumps([settings.sampling_rate, *texts, *map(asdict, speakers)])
    file = Path(settings.cache) / f"voices-{hashlib.sha256(contents.encode()).hexdigest()[:24]}.npz"
    if not file.is_file():
        check_voices({speaker.voice for speaker in speakers})
        file.parent.mkdir(parents=True, exist_ok=True)
        clips = []
        for row in training.tracked(len(speakers), f"speaking, {name}", progress):
            clips += [say(text, speakers[row], settings.sampling_rate) for text in texts]
        ends = np.cumsum([len(clip) for clip in clips])
        part = file.with_suffix(".part.npz")
        np.savez(part, samples=np.concatenate([np.int16(clip * 32767) for clip in clips]), ends=ends)
        part.replace(file)
    with np.load(file) as arrays:
        flat = np.split(arrays["samples"].astype(np.float32) / 32767, arrays["ends"][:-1])
    return Spoken(speakers, [flat[row * len(texts) : (row + 1) * len(texts)] for row in range(len(speakers))])


def find_espeak() -> str:
    """Return the path of the program."""
    program = shutil.which("espeak-ng")
    if program is None:
        raise ConfigError(
            "speech needs espeak-ng, which is not on the path: install it (Debian: apt-get install espeak-ng), or run "
            "the other part, config_series.yaml"
        )
    return program


def check_voices(voices: set[str]) -> None:
    """Refuse voices that espeak-ng lacks: it would use the accent's own voice in silence."""
    listed = [
        subprocess.run([find_espeak(), f"--voices{kind}"], capture_output=True, text=True, check=True).stdout
        for kind in ("=en", "=variant")
    ]
    accents = {line.split()[1] for line in listed[0].splitlines()[1:]}
    variants = {part[3:] for part in listed[1].split() if part.startswith("!v/")}
    unknown = sorted(
        voice for voice in voices if voice.split("+")[0] not in accents or voice.split("+")[1] not in variants
    )
    if unknown:
        raise ConfigError(f"espeak-ng has no voices {unknown}: install espeak-ng 1.51 or later with its data")


def say(text: str, speaker: Speaker, sampling_rate: int) -> Sound:
    """Return the samples of a text, without the silence around it."""
    options = ["-v", speaker.voice, "-s", str(speaker.speed), "-p", str(speaker.pitch), "--stdout"]
    result = subprocess.run([find_espeak(), *options, text], capture_output=True, check=False)
    if result.returncode or len(result.stdout) < 1000:
        raise ConfigError(
            f"espeak-ng on {text!r} as {speaker} gave {len(result.stdout)} bytes: "
            f"{result.stderr.decode(errors='replace').strip() or 'no reason'}"
        )
    # A WAV of 16 bits that states the length of an endless stream: a header of 44 bytes, with the rate at the 24th.
    rate = int.from_bytes(result.stdout[24:28], "little")
    sound = np.frombuffer(result.stdout[44 : len(result.stdout) // 2 * 2], np.int16).astype(np.float32)
    sound = resample(sound / np.abs(sound).max(), rate, sampling_rate)
    loud = np.flatnonzero(np.abs(sound) > 0.01)
    sound = sound[loud[0] : loud[-1] + 1]
    return sound / np.abs(sound).max()


def resample(sound: Sound, rate: int, target: int) -> Sound:
    """Resample a sound by cutting or padding its spectrum."""
    count = round(len(sound) * target / rate)
    spectrum = np.fft.rfft(sound)[: count // 2 + 1]
    return np.float32(np.fft.irfft(spectrum, count) * (count / len(sound)))
