"""The checks of the doctor: each runs a model again with one thing changed, and compares the outputs.

A check gives a verdict, True or False, or None for what is only reported or does not apply, and an answer in words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from mmattn.errors import NonFiniteError
from mmattn.inspect.doctor.trial import Trial, apart, cut, emptied, padded, shuffled
from mmattn.memory import Memory

Verdict = tuple[bool | None, str]
#: Where the memory of a row is replaced by that of the next one, and nothing changes.
ALIKE = "not checked: that of the next row changes none; give two rows or more with different memories"

# Is the memory attended to -------------------------------------------------------------------------------------------


def adds(trial: Trial) -> Verdict:
    """Check that the adapter changes the hidden states at each of its layers."""
    sizes = {index: apart(full, bare).max().item() for index, (full, _, bare) in trial.layer_outputs.items()}
    silent = [index for index in trial.adapter.layers if not sizes.get(index, 0) > trial.negligible]
    if silent:
        return False, f"nothing at layers {silent}, as a fresh adapter does: train it, or see its gates"
    return True, "relative to the hidden states: " + by_layer({index: f"{size:.1%}" for index, size in sizes.items()})


def depends(trial: Trial) -> Verdict:
    """Check that each layer's update depends on the memory; `adds` reports layers without an update."""
    outputs = trial.layer_outputs
    adding = [index for index, (full, _, bare) in outputs.items() if apart(full, bare).max() > trial.negligible]
    if not adding:
        return None, "not checked: no layer adds anything"
    constant = [index for index in adding if not apart(outputs[index][1], outputs[index][0]).max() > trial.negligible]
    if not isinstance(trial.memory, Memory) and constant == adding:
        return None, ALIKE
    if constant:
        return False, f"layers {constant} add the same for another memory: a gate at 0, or dead keys and values"
    return True, "another memory changes what is added, for the same hidden states"


def another_memory(trial: Trial) -> Verdict:
    """Check that another memory changes the output of every row that has one."""
    changes = apart(trial.other_output, trial.output)
    if not isinstance(trial.memory, Memory):
        changed, b = changes > trial.negligible, trial.memory.batch
        if not bool(changed.any()):
            return None, ALIKE
        return True, f"that of the next row changes {int(changed.sum())} of {b} rows, by up to {changes.max():.1%}"
    attending = trial.slots.real_slots().any(1).to(changes.device)
    constant = (attending & ~(changes > trial.negligible)).nonzero()[:, 0].tolist()
    if constant:
        return False, (
            f"does not change the output of rows {constant}: no token of theirs may attend to a slot, or the adapter "
            "adds nothing"
        )
    return True, f"changes every row with a memory, by {changes[attending].min():.1%} to {changes[attending].max():.1%}"


# Is attended to only what may be -------------------------------------------------------------------------------------


def padding(trial: Trial) -> Verdict:
    """Check that masked slots leave the output unchanged: their presence, numbers in them, NaN in them."""
    plain = trial.run(padded(trial.slots, 0.0))
    changes = {"presence": apart(plain, trial.output).max().item()}
    for word, filling in (("large numbers", 1e3), ("NaN", torch.nan)):
        try:
            changes[word] = apart(trial.run(padded(trial.slots, filling)), plain).max().item()
        except NonFiniteError:
            changes[word] = math.inf
    return no_influence(
        changes, trial, "masked slots change the output by their", "the mask is lost before the softmax"
    )


def future(trial: Trial) -> Verdict:
    """Check that no token attends to slots of later tokens."""
    first = trial.first_tokens()
    if first is None:
        return None, "not checked: every token may attend to every slot"
    first = torch.where(trial.slots.real_slots().cpu(), first, -1)
    begins = sorted(set(first.flatten().tolist()) - {-1, 0})
    changes = {}
    for begin in begins[:: max(1, len(begins) // 3)]:
        output = trial.run(shuffled(trial.memory, first >= begin))
        changes[f"before token {begin}"] = apart(output[:, :begin], trial.output[:, :begin]).max().item()
    if not changes:
        return None, "not checked: no slot is for later tokens only"
    return no_influence(
        changes, trial, "slots for later tokens change the output", "segments, images or chunks are counted wrongly"
    )


def rows(trial: Trial) -> Verdict:
    """Check that another memory in some rows leaves the output of the others unchanged."""
    b = trial.memory.batch
    if b < 2:
        return None, "not checked: give a batch of two rows or more"
    number, leaks = torch.arange(b), {}  # every two numbers differ in a binary digit
    for digit in range((b - 1).bit_length()):
        odd = (number >> digit & 1).bool()
        for changed in (odd, ~odd):
            sizes = apart(trial.run(shuffled(trial.memory, changed)), trial.output).cpu()
            same = number[~changed].tolist()
            leaks.update({f"row {i}": sizes[i].item() for i in same if sizes[i] > trial.rounding})
    if leaks:
        return False, f"another memory in other rows changes {sizes_of(leaks)}: rows are mixed in the adapter or memory"
    return True, "each depends on its own memory only"


def empty(trial: Trial) -> Verdict:
    """Check that rows without visible slots give the host's output."""
    alone = {"0 slots": cut(trial.slots), "all slots masked": emptied(trial.slots)}
    sizes = {word: apart(trial.run(memory), trial.host_output).max().item() for word, memory in alone.items()}
    bad = {word: size for word, size in sizes.items() if size > trial.negligible}
    if trial.memory.batch > 1:
        some = torch.arange(trial.memory.batch) % 2 == 0
        size = apart(trial.run(emptied(trial.slots, some)), trial.host_output).cpu()[some].max().item()
        bad |= {"rows without slots among others": size} if size > trial.rounding else {}
    if bad:
        hint = "what is added must be masked where no slot may be attended to (biases, gates)"
        return False, f"the output differs from the host's: {sizes_of(bad)}; {hint}"
    return True, host_alone(trial)


def disabled(trial: Trial) -> Verdict:
    """Check that a disabled adapter gives the host's output."""
    size = apart(trial.run(None), trial.host_output).max().item()
    if size > trial.negligible:
        return False, f"the output differs from the host's by {size:.1e}: something acts outside of the adapter's call"
    return True, host_alone(trial)


# Figures ------------------------------------------------------------------------------------------------------------


def gates(trial: Trial) -> Verdict:
    """Report the openings of the gates, or of an adapter without gates the size of its value projections."""
    return openings(dict(trial.adapter.named_parameters()))


def openings(tensors: Mapping[str, Tensor]) -> Verdict:
    """Report the openings of the gates among an adapter's tensors, or else the size of its value projections."""
    word = "open by"
    sizes = {name.removesuffix(".gate"): one.float().tanh() for name, one in tensors.items() if "gate.gate" in name}
    if not sizes:
        word, end = "no gates; largest value weights", ".v_proj.weight"
        projections = {name: one for name, one in tensors.items() if name.startswith("blocks.") and name.endswith(end)}
        sizes = {name.removesuffix(end): one for name, one in projections.items()}
    if not sizes:
        return None, "not checked: this kind has neither gates nor value projections; see whether each layer adds"
    largest = {name.removeprefix("blocks."): float(size.detach().abs().max()) for name, size in sizes.items()}
    shut = [name for name, size in largest.items() if not size > 0]
    if shut:
        return False, f"at 0: {', '.join(shut)}; a fresh adapter adds nothing until it is trained"
    return True, f"{word} {by_layer({name: f'{size:.3f}' for name, size in largest.items()})}"


def steady(trial: Trial) -> Verdict:
    """Check that two equal calls give the same output, which the other checks rely on."""
    if trial.noise == 0:
        return True, "the same output, bit for bit"
    if trial.noise > 1e-2:
        return False, f"differs by {trial.noise:.1e}: random numbers in evaluation mode, or a nondeterministic kernel"
    return None, f"differs by {trial.noise:.1e}: differences up to four times that count as none"


CHECKS: dict[str, Callable[[Trial], Verdict]] = {
    "the same call again": steady,
    "gates": gates,
    "each layer adds something": adds,
    "each layer depends on the memory": depends,
    "another memory": another_memory,
    "padding": padding,
    "slots for later tokens": future,
    "rows": rows,
    "empty memory": empty,
    "disabled": disabled,
}

#: Those that need slots of vectors: not for what else has rows.
OF_SLOTS = ("padding", "slots for later tokens", "empty memory")


# Answers ------------------------------------------------------------------------------------------------------------


def no_influence(changes: dict[str, float], trial: Trial, fault: str, hint: str) -> Verdict:
    """Return the verdict on changes of the output that may be nothing but rounding."""
    bad = {word: size for word, size in changes.items() if size > trial.rounding}
    if bad:
        return False, f"{fault}: {sizes_of(bad)}; {hint}"
    largest = max(changes.values())
    return True, f"no influence of {', '.join(changes)}" + (f" (rounding {largest:.0e})" if largest else "")


def host_alone(trial: Trial) -> str:
    """Return the answer where the output is that of the host."""
    return "the output of the host, bit for bit" if trial.noise == 0 else "the output of the host"


def sizes_of(sizes: Mapping[str, float]) -> str:
    """Return sizes by their cause, as text."""
    return ", ".join(f"{word} {size:.1e}" for word, size in sizes.items())


def by_layer(figures: Mapping[int, str] | Mapping[str, str]) -> str:
    """Return figures by layer, as text; of many, the first and the last few."""
    parts = [f"{layer} {figure}" for layer, figure in figures.items()]
    return ", ".join(parts if len(parts) <= 8 else [*parts[:4], "…", *parts[-3:]])
