"""Every family of transformers against every check, each in a process of its own, and the page that tells of it.

    python -m tests.families.matrix [FAMILY …]

Writes docs/families.md, or prints the outcomes of some families. Takes a quarter of an hour on one core; ends with 1
where a row is wrong.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import diffusers
import torch
import transformers
from transformers.models.auto import modeling_auto as auto

from mmattn.progress import counted
from tests import tiny_unets
from tests.families import diffusion
from tests.families.checks import CHECKS, HOST, WORKS, WRITING, outcomes

PAGE = Path(__file__).resolve().parents[2] / "docs" / "families.md"
MEMORY, SECONDS = 7 << 30, 480  # of one family


@dataclass(frozen=True)
class Group:
    """Families of one kind of host."""

    title: str
    auto: str
    names: tuple[str, ...]
    where: str | None = None
    writes: bool = True

    @property
    def checks(self) -> list[str]:
        """Names of what is checked."""
        return [check for check in CHECKS if self.writes or check not in WRITING]

    def run(self, name: str) -> dict[str, str]:
        """The outcomes of one family."""
        return outcomes(name, getattr(transformers, self.auto), self.where, self.writes)


class DiffusionGroup(Group):
    """Families of diffusers, by the names of their classes."""

    @property
    def checks(self) -> list[str]:
        """Names of what is checked."""
        return list(diffusion.CHECKS)

    def run(self, name: str) -> dict[str, str]:
        """The outcomes of one family."""
        return diffusion.outcomes(name)


def _known(mapping: str) -> tuple[str, ...]:
    names = getattr(auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES")
    return tuple(sorted(name for name in names if name in transformers.CONFIG_MAPPING))


def _has_both(name: str) -> bool:
    """Whether models of this family have an encoder and a decoder."""
    kind = transformers.CONFIG_MAPPING[name]
    return bool(getattr(kind, "is_encoder_decoder", False)) or name in _TWO_MODELS


_TWO_MODELS = ("encoder-decoder", "speech-encoder-decoder")
_BOTH = tuple(name for name in _known("SEQ_TO_SEQ_CAUSAL_LM") if _has_both(name))
_HEARD = tuple(name for name in _known("SPEECH_SEQ_2_SEQ") if _has_both(name) and name not in _BOTH)
_LEFT_OUT = set(_known("CAUSAL_LM")) - set(_known("MASKED_LM"))  # with a head for classes they read as they write
_READ = tuple(name for name in _known("SEQUENCE_CLASSIFICATION") if name not in _LEFT_OUT)
GROUPS = (
    Group("Causal language models", "AutoModelForCausalLM", _known("CAUSAL_LM")),
    Group("Models that already see or hear", "AutoModelForMultimodalLM", _known("MULTIMODAL_LM")),
    Group("Encoder–decoders, adapter in the decoder", "AutoModelForSeq2SeqLM", _BOTH, "decoder"),
    Group("Encoder–decoders, adapter in the encoder", "AutoModelForSeq2SeqLM", _BOTH, "encoder"),
    Group("Speech to text, adapter in the decoder", "AutoModelForSpeechSeq2Seq", _HEARD, "decoder"),
    Group("Speech to text, adapter in the encoder", "AutoModelForSpeechSeq2Seq", _HEARD, "encoder"),
    Group("Encoders of texts", "AutoModelForSequenceClassification", _READ, writes=False),
    Group("Encoders of pictures", "AutoModelForImageClassification", _known("IMAGE_CLASSIFICATION"), writes=False),
    Group("Encoders of sounds", "AutoModelForAudioClassification", _known("AUDIO_CLASSIFICATION"), writes=False),
    DiffusionGroup("Diffusion transformers", "diffusers", diffusion.NAMES, writes=False),
    DiffusionGroup("UNets", "diffusers", tuple(tiny_unets.KINDS), writes=False),
)


def apart(group: Group, name: str) -> dict[str, str]:
    """The outcomes of one family, from a process that may fail as it likes."""
    with tempfile.TemporaryFile() as told:
        child = os.fork()
        if child == 0:
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            signal.alarm(SECONDS)
            silent = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silent, 1)
            os.dup2(silent, 2)
            told.write(json.dumps(group.run(name)).encode())
            told.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        told.seek(0)
        found: dict[str, str] = json.loads(told.read() or b"{}")
    return found or {"family": f"wrong: the process ended with {status}"}


def row(name: str, found: dict[str, str], checks: list[str]) -> str:
    """One line of a table: a tick for what works, a number for what the host itself does not do."""
    cells = ["✓" if found[check] == WORKS else "–" if found[check].startswith(HOST) else "✗" for check in checks]
    return f"| {name} | {' | '.join(cells)} |"


def tables(found: dict[str, dict[str, dict[str, str]]]) -> Iterator[str]:
    """The page, line by line."""
    versions = {"version": transformers.__version__, "diffusers": diffusers.__version__}
    yield HEAD.format(**versions, torch=torch.__version__.split("+")[0])
    for group in GROUPS:
        rows = found.get(group.title, {})
        whole = {name: one for name, one in rows.items() if one["family"] == WORKS}
        checks = group.checks
        yield f"\n## {group.title}\n"
        yield f"{len(whole)} of {len(rows)}.\n"
        yield f"| family | {' | '.join(checks)} |"
        yield f"|---{'|:---:' * len(checks)}|"
        yield from (row(name, one, checks) for name, one in whole.items())
        others = {name: one["family"] for name, one in rows.items() if name not in whole}
        for start, title in (("refused", "Refused by `attach`"), (HOST, "Not tried"), ("wrong", "Wrong")):
            part = {name: text.partition(": ")[2] for name, text in others.items() if text.startswith(start)}
            if part:
                yield f"\n{title}:\n"
                yield from (f"- {name}: {_plain(text)}" for name, text in part.items())


def _plain(text: str) -> str:
    """Words of an error on one line of a page."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("_", "\\_").replace("*", "\\*")[:160]


def is_wrong(found: dict[str, str]) -> bool:
    """Whether an outcome is neither right, nor refused, nor the host's own."""
    return any(text.startswith("wrong") for text in found.values())


HEAD = """# Families

Written by `make families` with transformers {version}, diffusers {diffusers} and torch {torch}: every class of these
kinds that transformers can build tiny from the names of its settings, with random weights and a `GatedAdapter` at its
first two layers; and the transformers and UNets of diffusers, with a `DecoupledAdapter` in every block. ✓ is a check
that passes; – is something that the host itself, without a memory, does not do alike (a static cache that transformers
has not for it, experts whose answer changes with the batch); ✗ is a refusal in words.

| check | what is compared |
|---|---|
| fresh | a fresh adapter leaves the host's answer bit for bit |
| memory by row | a memory changes its own row, from the first token on, and no other |
| row without memory | where all slots are hidden, the host's own answer: bit for bit, with experts to 1e-5 |
| row by row | a batch and its rows one by one, hidden slots left out |
| names | what the bare host takes, old names and new, it takes beside a memory; token by token is one pass |
| cache | `generate` with its cache, without it, and the forward |
| padding | prompts of two lengths in one batch and alone: padded on the left, what an encoder reads on the right |
| beams | beams of a batch and of its rows |
| static cache | `cache_implementation="static"` |
| save and load | onto another host of the same weights, bit for bit |
| deep copy | answers as the original |
| scale | `adapter_scale` 0 as a number, by row, block and step: the host's own answer bit for bit |
| by pixel | a map of ones, of any size, is the number 1, of zeros the host bit for bit; for films also by frame |
| guidance | of twice the rows the unconditional half sees no memory, the other its own |
| steps | keys and values of a memory are computed once for all steps |
| LoRA | beside a LoRA on the host's attention |
| gradients | finite for every weight of the adapter, none for the host; equal with recomputed layers, both modes |
| unload | the same object, answers and weights |
"""


def main(names: list[str]) -> int:
    """Write the page, or print the rows of some families; 1 where something is wrong."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    chosen = [(group, name) for group in GROUPS for name in group.names if not names or name in names]
    found: dict[str, dict[str, dict[str, str]]] = {}
    with counted(len(chosen), "families") as advance:
        for group, name in chosen:
            found.setdefault(group.title, {})[name] = apart(group, name)
            advance(1)
    wrong = [(title, name, one) for title, rows in found.items() for name, one in rows.items() if is_wrong(one)]
    if names:
        print(json.dumps(found, indent=1))
    else:
        PAGE.write_text("\n".join(tables(found)) + "\n", encoding="utf-8")
    for title, name, one in wrong:
        print(f"{title}: {name}: { {check: text for check, text in one.items() if text.startswith('wrong')} }")
    print(f"{len(chosen)} rows, {len(wrong)} wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
