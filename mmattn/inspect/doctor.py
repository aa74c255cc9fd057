"""Is a model with adapters well? Every question is an experiment: it is asked again, with one thing changed."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mmattn.adapters.projected import PreparedMemory
from mmattn.hosts.adapted import AdaptedModel
from mmattn.inspect.batches import memories_of
from mmattn.inspect.environment import version
from mmattn.inspect.report import Report
from mmattn.inspect.trial import Trial, apart, cut, emptied, padded, real_slots, resting, shuffled

Verdict = tuple[bool | None, str]


def doctor(model: AdaptedModel, batch: Mapping[str, Any]) -> Report:
    """What `mmattn.doctor(model, batch)` finds out: a table of questions about each active adapter, with a verdict
    each.

    The model is called some twenty times without gradients; hooks, modes and random states come back as they were.

    Args:
        batch: what the model takes, by name, `memory` with it.

    Raises:
        ConfigError: no batch with a memory to look at. ConditionError: no adapter is active, or the batch has a cache.
    """
    report = Report()
    with resting(model):
        memories = memories_of(model, batch)
        for name, memory in memories.items():
            trial = Trial(model, name, batch, memory)
            trial.answer  # noqa: B018 - what the model itself refuses is no question of health
            title = f"{name}: " if len(memories) > 1 else ""
            for question, experiment in QUESTIONS.items():
                try:
                    verdict, answer = experiment(trial)
                except Exception as error:
                    verdict, answer = False, f"the experiment stopped with {type(error).__name__}: {error}"
                report.add(verdict, title + question, answer)
    trained, total = model.trainable_parameters()
    report.add(None, "trainable parameters", f"{trained:,} of {total:,} ({trained / max(total, 1):.2%})")
    report.add(None, "versions", versions(model))
    return report


# Does it reach ------------------------------------------------------------------------------------------------------


def adds(trial: Trial) -> Verdict:
    """Whether the adapter adds something behind or beside each of its layers."""
    sizes = {index: apart(full, bare).max().item() for index, (full, _, bare) in trial.places.items()}
    silent = [index for index in trial.adapter.layers if not sizes.get(index, 0) > trial.nothing]
    if silent:
        return False, f"nothing at layers {silent}, as of an adapter that is fresh: train it, or see its gates below"
    return True, "share of the hidden states: " + by_layer({index: f"{size:.1%}" for index, size in sizes.items()})


def heeds(trial: Trial) -> Verdict:
    """Whether what is added at each layer depends on the memory; layers that add nothing are left to `adds`."""
    adding = [index for index, (full, _, bare) in trial.places.items() if apart(full, bare).max() > trial.nothing]
    if not adding:
        return None, "not asked: no layer adds anything"
    deaf = [
        index for index in adding if not apart(trial.places[index][1], trial.places[index][0]).max() > trial.nothing
    ]
    if deaf:
        return False, f"layers {deaf} add the same for another memory: a gate of 0, or keys and values that died"
    return True, "another memory is another share, for the same hidden states"


def answers(trial: Trial) -> Verdict:
    """Whether every row that has a memory answers otherwise to another one."""
    moved = apart(trial.other, trial.answer)
    seeing = real_slots(trial.memory).any(1).to(moved.device)
    stuck = (seeing & ~(moved > trial.nothing)).nonzero()[:, 0].tolist()
    if stuck:
        return False, f"rows {stuck} answer the same: no token of theirs may see a slot, or the adapter adds nothing"
    return True, f"moves every row with a memory, by {moved[seeing].min():.1%} to {moved[seeing].max():.1%}"


# Does it keep to what may be seen -----------------------------------------------------------------------------------


def padding(trial: Trial) -> Verdict:
    """Whether masked slots matter: that they are there, numbers in them, NaN in them."""
    plain = trial.ask(padded(trial.memory, 0.0))
    found = {"being there": apart(plain, trial.answer).max().item()}
    for word, filling in (("large numbers", 1e3), ("NaN", torch.nan)):
        found[word] = apart(trial.ask(padded(trial.memory, filling)), plain).max().item()
    return kept(found, trial, "masked slots matter by", "the mask is lost on the way to the softmax")


def future(trial: Trial) -> Verdict:
    """Whether tokens see slots that only later tokens may see."""
    due = trial.first_tokens()
    if due is None:
        return None, "not asked: every token may see every slot"
    slots = torch.where(real_slots(trial.memory).cpu(), due, -1)
    begins = sorted(set(slots.flatten().tolist()) - {-1, 0})
    found = {}
    for begin in begins[:: max(1, len(begins) // 3)]:
        changed = apart_before(trial.ask(shuffled(trial.memory, slots >= begin)), trial.answer, begin)
        found[f"before token {begin}"] = changed
    if not found:
        return None, "not asked: no slot waits for a later token"
    return kept(found, trial, "slots for later tokens matter", "segments, images or chunks are counted wrongly")


def rows(trial: Trial) -> Verdict:
    """Whether a row answers otherwise when only other rows get another memory.

    Rows are told apart by the digits of their numbers: every pair differs in one.
    """
    b = trial.memory.batch
    if b < 2:
        return None, "not asked: give a batch of two rows or more"
    number, leaks = torch.arange(b), {}
    for digit in range((b - 1).bit_length()):
        odd = (number >> digit & 1).bool()
        for changed in (odd, ~odd):
            moved = apart(trial.ask(shuffled(trial.memory, changed)), trial.answer).cpu()
            leaks.update({f"row {i}": moved[i].item() for i in number[~changed].tolist() if moved[i] > trial.rounding})
    if leaks:
        return False, f"another memory of other rows moves {shares(leaks)}: rows are mixed in the adapter or its memory"
    return True, "each reacts to its own only"


def empty(trial: Trial) -> Verdict:
    """Whether an adapter with nothing to see is nothing."""
    alone = {"0 slots": cut(trial.memory), "all slots masked": emptied(trial.memory)}
    found = {word: apart(trial.ask(memory), trial.host).max().item() for word, memory in alone.items()}
    bad = {word: size for word, size in found.items() if size > trial.nothing}
    if trial.memory.batch > 1:
        some = torch.arange(trial.memory.batch) % 2 == 0
        size = apart(trial.ask(emptied(trial.memory, some)), trial.host).cpu()[some].max().item()
        bad |= {"rows without, among others": size} if size > trial.rounding else {}
    if bad:
        return (
            False,
            f"moves the host: {shares(bad)}; what is added must be masked where nothing is seen (biases, gates)",
        )
    return True, "is the host, bit for bit" if trial.noise == 0 else "is the host"


def disabled(trial: Trial) -> Verdict:
    """Whether a disabled adapter is nothing."""
    moved = apart(trial.ask(None), trial.host).max().item()
    if moved > trial.nothing:
        return False, f"moves the host by {moved:.1e}: something acts outside of the adapter's call"
    return True, "is the host, bit for bit" if trial.noise == 0 else "is the host"


# Figures ------------------------------------------------------------------------------------------------------------


def gates(trial: Trial) -> Verdict:
    """How far the gates are open, or of an adapter without the weights that start at 0."""
    return openings(dict(trial.adapter.named_parameters()))


def openings(tensors: Mapping[str, Tensor]) -> Verdict:
    """How far the gates among these tensors are open; of a decoupled adapter, how large its value projections are."""
    gates = open_gates(tensors)
    word = "open by" if gates else "no gates; largest value weights"
    found = gates or {
        name.removeprefix("blocks.").removesuffix(".v_proj.weight"): value.detach().abs().max().item()
        for name, value in tensors.items()
        if name.startswith("blocks.") and name.endswith(".v_proj.weight")
    }
    if not found:
        return None, "none among the weights of this kind: see whether each layer adds something"
    shut = [name for name, size in found.items() if not size > 0]
    if shut:
        return False, f"at 0: {', '.join(shut)}; a fresh adapter adds nothing until it is trained"
    return True, f"{word} {by_layer({name: f'{size:.3f}' for name, size in found.items()})}"


def open_gates(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """How far each gate is open: the largest |tanh| of its numbers, by the name of its block and part."""
    gates = {name: value for name, value in tensors.items() if name.endswith("gate.gate")}
    return {
        name.removeprefix("blocks.").removesuffix(".gate"): value.detach().float().tanh().abs().max().item()
        for name, value in gates.items()
    }


def padding_share(trial: Trial) -> Verdict:
    """The largest share of a query's attention that slots out of its sight get: exactly 0."""
    if not trial.looks:
        return None, "not asked: this kind does not attend to its memory"
    bad = {f"layer {index}": look.padding for index, look in trial.looks.items() if look.padding != 0}
    if bad:
        return False, f"{shares(bad)}: the mask is lost on the way to the softmax"
    return True, "exactly 0"


def entropy(trial: Trial) -> Verdict:
    """How evenly the slots are looked at."""
    figures = {
        index: f"{look.entropy:.2f} of {look.uniform:.2f}" for index, look in trial.looks.items() if look.uniform
    }
    return None, f"bits, of uniform: {by_layer(figures)}" if figures else "no query has a choice"


def null(trial: Trial) -> Verdict:
    """What the null slot takes."""
    if not getattr(trial.adapter.config, "null_slot", False):
        return None, "there is none"
    return None, "takes " + by_layer({index: f"{look.null:.1%}" for index, look in trial.looks.items()})


def cost(trial: Trial) -> Verdict:
    """Bytes of keys and values kept for this batch."""
    prepared = trial.model.prepare({trial.name: trial.memory})[trial.name]
    if not isinstance(prepared, PreparedMemory):
        return None, "not asked: this kind of memory is not projected for many calls"
    trial.ask(prepared)
    made, b = prepared.nbytes(), trial.memory.batch
    return (
        None,
        f"{made:,} bytes of keys and values, {made // b:,} a row, for a memory of {trial.memory.tokens.nbytes:,}",
    )


def steady(trial: Trial) -> Verdict:
    """Whether the same call gives the same answer, which the other questions lean on."""
    if trial.noise == 0:
        return True, "is bit for bit the same"
    if trial.noise > 1e-2:
        return False, f"is {trial.noise:.1e} apart: random numbers in evaluation, or a kernel that is not deterministic"
    return None, f"is {trial.noise:.1e} apart: four times that counts as nothing below"


QUESTIONS: dict[str, Callable[[Trial], Verdict]] = {
    "the same call again": steady,
    "gates": gates,
    "each layer adds something": adds,
    "each layer heeds the memory": heeds,
    "another memory": answers,
    "padding": padding,
    "slots for later tokens": future,
    "rows": rows,
    "empty memory": empty,
    "disabled": disabled,
    "attention on padding": padding_share,
    "attention entropy": entropy,
    "null slot": null,
    "memory cost": cost,
}


# Words --------------------------------------------------------------------------------------------------------------


def apart_before(got: Tensor, want: Tensor, length: int) -> float:
    """How far apart two answers (b, l, …) are in their first tokens."""
    return apart(got[:, :length], want[:, :length]).max().item()


def kept(found: dict[str, float], trial: Trial, fault: str, hint: str) -> Verdict:
    """The verdict on influences that must be nothing but rounding."""
    bad = {word: size for word, size in found.items() if size > trial.rounding}
    if bad:
        return False, f"{fault}: {shares(bad)}; {hint}"
    largest = max(found.values())
    return True, f"no influence of {', '.join(found)}" + (f" (rounding {largest:.0e})" if largest else "")


def shares(sizes: Mapping[str, float]) -> str:
    """Sizes by what they are of, as text."""
    return ", ".join(f"{word} {size:.1e}" for word, size in sizes.items())


def by_layer(figures: Mapping[Any, str]) -> str:
    """Figures by layer, as text; of many, the first and the last few."""
    parts = [f"{layer} {figure}" for layer, figure in figures.items()]
    return ", ".join(parts if len(parts) <= 8 else [*parts[:4], "…", *parts[-3:]])


def versions(model: AdaptedModel) -> str:
    """What this was found with."""
    known = {"Python": platform.python_version(), "mmattn": version("mmattn") or "from source"}
    used = "diffusers" if type(model.host).__module__.startswith("diffusers") else "transformers"
    return ", ".join(
        f"{name} {number}" for name, number in {**known, **{n: version(n) for n in ("torch", used)}}.items()
    )
