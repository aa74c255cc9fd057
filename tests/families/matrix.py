"""Every family of transformers against every check, each in a process of its own, and the page that tells of it.

    python -m tests.families.matrix [FAMILY …]

Writes docs/families.md, or prints the outcomes of some families. Takes a quarter of an hour on one core; ends with 1
where a row is wrong.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
import tempfile
import textwrap
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


def failures(found: dict[str, str], checks: list[str]) -> str:
    """Cells of a table: the checks that the host itself does not pass, and those that are refused."""
    failed = {check: found[check].startswith(HOST) for check in checks if found[check] != WORKS}
    return " | ".join(", ".join(check for check in failed if failed[check] is by_host) for by_host in (True, False))


def tables(found: dict[str, dict[str, dict[str, str]]]) -> Iterator[str]:
    """The page, line by line."""
    versions = {"version": transformers.__version__, "diffusers": diffusers.__version__}
    yield HEAD.format(**versions, torch=torch.__version__.split("+")[0])
    for group in GROUPS:
        rows = found.get(group.title, {})
        attached = {name: outcome for name, outcome in rows.items() if outcome["family"] == WORKS}
        alike: dict[str, list[str]] = {}
        for name, outcome in attached.items():
            alike.setdefault(failures(outcome, group.checks), []).append(name)
        yield f"\n## {group.title}\n"
        yield _filled(f"{len(attached)} of {len(rows)} work. Checks: {', '.join(group.checks)}.") + "\n"
        yield _filled(f"Every check passes for: {_listed(alike.pop(' | ', []))}.")
        if alike:
            yield "\n| families | not done by the host itself | refused |\n|---|---|---|"
            yield from (f"| {_listed(names)} | {cells} |" for cells, names in alike.items())
        others = {name: outcome["family"] for name, outcome in rows.items() if name not in attached}
        for start, title in (("refused", "Refused by `attach`"), ("wrong", "Wrong")):
            reasons: dict[str, list[str]] = {}
            for name, text in others.items():
                if text.startswith(start):
                    reasons.setdefault(_plain(text.partition(": ")[2]), []).append(name)
            if reasons:
                yield f"\n{title}:\n"
                yield from (f"- {_listed(names)}: {reason}" for reason, names in reasons.items())
        if untried := [name for name, text in others.items() if text.startswith(HOST)]:
            yield "\n" + _filled(f"Not tried: {_listed(untried)}.")


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _filled(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _plain(text: str) -> str:
    """The first clause of an error for a page, with "n" for numbers and "the model" for its class."""
    clause = re.split(r"; | \(\w*Error| for \d+ rows|: its ", text)[0]
    alike = re.sub(r"\b[A-Z]\w+(Model|LMHead|For\w+|Embeddings)\b", "the model", clause)
    short = textwrap.shorten(re.sub(r"\d+", "n", alike), 160, placeholder=" …")
    return short.replace("|", "\\|").replace("<", "&lt;").replace("_", "\\_").replace("*", "\\*")


def is_wrong(found: dict[str, str]) -> bool:
    """Whether an outcome is neither right, nor refused, nor the host's own."""
    return any(text.startswith("wrong") for text in found.values())


HEAD = """# Families

Look up whether your model works as a host, and which of the checks below it passes. `make families` writes this page,
here with transformers {version}, diffusers {diffusers} and torch {torch}. It builds a tiny model with random weights
for each class, with a `GatedAdapter` at its first two layers, or a `DecoupledAdapter` in every block of a diffusion
model. To see all outcomes and reasons for your model:

```sh
python -m tests.families.matrix llama
```

- *Not done by the host itself*: without a memory, too, the host fails this check. For example, transformers has no
  static cache for it, or the answer of its experts changes with the batch.
- *Refused*: the call raises an error that says why. In the lists below, n stands for any number.
- *Not tried*: no tiny model can be built from the names of its settings, its inputs are unknown, or the bare model
  does not answer.

| check | compares or requires |
|---|---|
| fresh | a fresh adapter leaves the host's answer bit for bit |
| memory by row | a memory changes its own row, from the first token on, and no other |
| row without memory | the host's answer if all slots are hidden: bit for bit, with experts to 1e-5 |
| row by row | a batch and its single rows, without their hidden slots |
| names | arguments of the bare host, old names and new, work beside a memory; token by token equals one pass |
| cache | `generate` with its cache, without it, and the forward |
| padding | prompts of two lengths in one batch and alone: left padding, right padding for encoders |
| beams | beams of a batch and of its single rows |
| static cache | `cache_implementation="static"` |
| save and load | onto a second host with the same weights, bit for bit |
| deep copy | answers as the original |
| scale | `adapter_scale=0` by number, row, block and step: the host's answer bit for bit |
| by pixel | a map of ones of any size equals the number 1, of zeros the host, bit for bit; for videos by frame too |
| guidance | in a doubled batch the unconditional half sees no memory, the conditional half its own |
| steps | keys and values of a memory are computed once for all steps |
| LoRA | beside a LoRA on the host's attention |
| gradients | finite for every adapter weight, none for the host; equal with both modes of gradient checkpointing |
| unload | the same object, answers and weights |"""


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
