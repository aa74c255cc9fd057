"""Checks of an adapter under the instruments: the doctor, recorded weights, attribution and the page that shows it."""

from __future__ import annotations

import os
import tempfile
from unittest import SkipTest

import torch

from mmattn.errors import ConditionError
from mmattn.inspect.attribution import attribute
from mmattn.inspect.diagnosis import doctor
from mmattn.inspect.explorer import write_page
from mmattn.inspect.record_attention import record
from mmattn.inspect.trace import load_traces, save_traces
from mmattn.testing.case import Case, close, same
from mmattn.testing.running import Check


def check_doctor(case: Case) -> None:
    """The doctor finds a trained adapter well, a fresh one silent, and leaves the model as it was."""
    model, memory = case.trained(), case.memory()
    if not hasattr(memory, "__getitem__"):
        raise SkipTest(f"its memory is a {type(memory).__name__}, which no other can stand for")
    answer = case.ask(model, memory)
    report = doctor(model, {**case.batch, "memory": memory})
    assert report.ok, f"a trained adapter is found ill:\n{report}"
    same(case.ask(model, memory), answer, "after the doctor")
    if not model.adapter(case.name).starts_as_nothing:
        return
    failed = doctor(case.fresh(), {**case.batch, "memory": memory}).failed
    assert "each layer adds something" in failed, f"a fresh adapter is found to add something: {failed}"


def check_record(case: Case) -> None:
    """`record` gives the weights of every block that attends, sums of at most 1, 0 on masked slots; answers stay."""
    model, memory = case.trained(), case.memory()
    answer = case.ask(model, memory)
    try:
        with record(model) as weights:
            same(case.ask(model, memory), answer, "while weights are recorded")
    except ConditionError as error:  # the host's own attention does more than a softmax of scaled scores
        raise SkipTest(str(error)) from error
    if not any(name == case.name for name, _ in model.attentions()):
        raise SkipTest("it does not attend to its memory")
    places = {(case.name, layer) for layer in model.adapter(case.name).layers}
    assert set(weights) == places, f"recorded at {sorted(weights)}, and the adapter is at {sorted(places)}"
    for place, (seen, *rest) in weights.items():
        assert seen.dim() == 4 and not rest, f"{place}: not one call with weights (b, h, l, m)"
        assert bool((seen >= 0).all()) and bool((seen.sum(-1) <= 1 + 1e-4).all()), f"{place}: no shares"
    if any(seen.shape[::3] == answer.shape[:1] for (seen, *_) in weights.values()):
        slots = case.slots()
        for place, (seen, *_) in weights.items():
            if seen.shape[3] == slots.length:
                hidden = seen.masked_fill(slots.real_slots()[:, None, None], 0)
                assert not bool(hidden.any()), f"{place}: masked slots have weights"
    same(case.ask(model, memory), answer, "after the recording")


def check_attribution(case: Case) -> None:
    """Where the host predicts tokens, `attribute` explains a text by the slots; its trace is drawn, saved and shown."""
    model, memory = case.trained(), case.slots()[:1]
    if not model.predicts_tokens:
        raise SkipTest("this kind of host predicts no tokens")
    if set(case.batch) != {"input_ids"}:
        raise SkipTest("this adapter needs more of a text than its ids")
    ids = case.batch["input_ids"][:1]
    try:
        trace = attribute(model, ids, memory, name=case.name)
    except ConditionError as error:
        raise SkipTest(str(error)) from error
    l, s = ids.shape[1] - 1, memory.lengths[0]
    assert trace.probability is not None and trace.without is not None and trace.dropped is not None
    assert trace.weights.shape[2:] == (l, s) and trace.dropped.shape == (l, s), f"{l} words, {s} slots: {trace}"
    host = case.ask(case.make_host(), batch={"input_ids": ids}).float().log_softmax(-1)[:, :-1]
    close(trace.without, host.gather(2, ids[:, 1:, None])[0, :, 0].exp(), "the probabilities without a memory")
    assert not torch.equal(trace.dropped, trace.probability[:, None].expand(l, s)), "no slot matters"
    with tempfile.TemporaryDirectory() as run:
        save_traces([trace], run)
        (again,) = load_traces(run)
        assert again.draw() == trace.draw() and trace.draw(), "a trace that was saved is drawn otherwise"
        page = os.path.join(run, "page.html")
        notes = write_page([again], page)
        assert not notes and os.path.getsize(page) > 0, f"the page leaves something out: {notes}"


CHECKS: list[Check] = [check_doctor, check_record, check_attribution]
