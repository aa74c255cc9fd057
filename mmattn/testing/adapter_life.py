"""Checks of an adapter's life on a host: among others, in files, and gone."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from unittest import SkipTest

import torch

from mmattn.adapters.serialization import CONFIG, TENSORS
from mmattn.errors import AttachError, ConfigError, MmattnError
from mmattn.hosts.attach import attach
from mmattn.hosts.loading import load
from mmattn.testing.case import Case, cast, close, differ, no_trace, refuses, same, stir, traces
from mmattn.testing.running import Check


def check_unload_leaves_no_trace(case: Case) -> None:
    """`unload` gives back the very same host with nothing on it: attributes, hooks, modes, requires_grad, weights."""
    untouched, host = case.make_host(), case.make_host()
    for one in (untouched, host):
        for parameter in list(one.parameters())[::2]:
            parameter.requires_grad_(False)
    case.ask(untouched)
    before = traces(untouched)
    model = attach(host, case.adapter, case.name, **case.options)
    stir(model.adapter(case.name))
    assert sorted(host.state_dict()) == before["state_dict"], "the state_dict of the host has other keys"
    case.ask(model, case.memory())
    case.call(model, case.memory()).float().mean().backward()
    assert model.unload() is host, "unload() gives another object than attach() was given"
    no_trace(host, before, "after unload()")
    same(case.ask(host), case.host, "the host after unload()")
    again = attach(host, case.adapter, case.name, **case.options)
    if again.adapter(case.name).starts_as_nothing:
        same(case.ask(again, case.memory()), case.host, "attached again")


def check_adapters_stack(case: Case) -> None:
    """Several adapters act together, each on its own memory, and are switched by set_adapter and disable_adapter."""
    model, memory = case.trained(), case.memory()
    if not model.adapter(case.name).starts_as_nothing:
        raise SkipTest("a fresh one is seen, so that another is not as it was beside it")
    alone = case.ask(model, memory)
    model.add_adapter("second", case.adapter)
    same(case.ask(model, {case.name: memory, "second": case.memory(1)}), alone, "beside a fresh one")
    stir(model.adapter("second"), seed=11)
    both = case.ask(model, {case.name: memory, "second": case.memory(1)})
    differ(both, alone, "two adapters and one")
    same(case.ask(model, {case.name: memory}), alone, "the other without a memory")
    with model.disable_adapter("second"):
        same(case.ask(model, {case.name: memory, "second": case.memory(1)}), alone, "the other disabled")
    model.set_adapter("second")
    second = case.ask(model, case.memory(1))
    differ(second, alone, "the second alone")
    model.set_adapter([case.name, "second"])
    same(case.ask(model, {case.name: memory, "second": case.memory(1)}), both, "both again")
    model.delete_adapter(case.name)
    same(case.ask(model, case.memory(1)), second, "the first deleted")
    refuses(AttachError, lambda: model.delete_adapter("second"), "the only one deleted")
    same(case.ask(model.unload()), case.host, "unloaded")


def check_merging(case: Case) -> None:
    """`add_weighted_adapter` makes the weighted sum of two adapters, which is not active until it is set."""
    model, memory = case.trained(), case.memory()
    model.add_adapter("second", case.adapter)
    stir(model.adapter("second"), seed=11)
    model.set_adapter(case.name)
    alone = case.ask(model, memory)
    model.add_weighted_adapter([case.name, "second"], [0.25, 0.75], "sum")
    same(case.ask(model, memory), alone, "before it is set")
    first, second = (model.adapter(name).state_dict() for name in (case.name, "second"))
    for key, value in model.adapter("sum").state_dict().items():
        close(value, 0.25 * first[key] + 0.75 * second[key], key)
    model.set_adapter("sum")
    differ(case.ask(model, memory), case.host, "the sum")
    refuses(
        ConfigError, lambda: model.add_weighted_adapter([case.name, "second"], [1.0], "short"), "one weight for two"
    )
    assert "short" not in model.adapters, "a merge that was refused left an adapter"


def check_saved_is_loaded(case: Case) -> None:
    """What `save_adapter` wrote is loaded by `mmattn.load` onto a new host: the same settings, weights and answers."""
    model, memory = case.trained(), case.memory()
    answer = case.ask(model, memory)
    with tempfile.TemporaryDirectory() as folder:
        model.save_adapter(folder, case.name)
        with open(os.path.join(folder, CONFIG), encoding="utf-8") as file:
            written = json.load(file)
        assert written["kind"] == case.adapter.kind, f"the file is of kind {written['kind']!r}"
        assert written["layers"] == list(model.adapter(case.name).layers), f"the file says layers {written['layers']}"
        package = type(case.adapter).__module__.partition(".")[0]
        assert written["package"] == package, f"the file says it is from {written['package']!r}"
        loaded = load(case.make_host(), folder, case.name, **case.options)
    settings = loaded.adapter(case.name).config
    assert settings == model.adapter(case.name).config, f"settings: {settings}"
    before, after = (one.adapter(case.name).state_dict() for one in (model, loaded))
    assert list(before) == list(after), "the weights have other names"
    for name, value in after.items():
        same(value, before[name], name)
    same(case.ask(loaded, memory), answer, "the loaded adapter")
    same(case.ask(loaded), case.host, "the loaded adapter without a memory")


def check_any_saved_precision_is_loaded(case: Case) -> None:
    """What was saved in half or double precision is loaded beside a host in any, in float32 or as asked."""
    memory = case.memory()
    for saved in (torch.float16, torch.bfloat16, torch.float64):
        model = case.trained()
        model.adapter(case.name).to(saved)
        kept = {name: value.clone() for name, value in model.adapter(case.name).state_dict().items()}
        with tempfile.TemporaryDirectory() as folder:
            model.save_adapter(folder, case.name)
            whole = load(case.make_host(), folder, case.name, **case.options)
            asked = load(case.make_host(), folder, case.name, dtype="auto", **case.options)
            with warnings.catch_warnings():  # what it was trained on cannot be told from weights that were rounded
                warnings.filterwarnings("ignore", message="the weights of this .* are not those")
                beside_half = load(case.make_host().to(torch.bfloat16), folder, case.name, **case.options)
        model.adapter(case.name).float()
        for name, value in whole.adapter(case.name).state_dict().items():
            same(value, model.adapter(case.name).state_dict()[name], f"{name}, saved in {saved}")
        same(case.ask(whole, memory), case.ask(model, memory), f"saved in {saved}, loaded in float32")
        for name, value in asked.adapter(case.name).state_dict().items():
            assert value.dtype == kept[name].dtype, f"{name} was saved in {kept[name].dtype} and is in {value.dtype}"
            same(value, kept[name], f"{name}, saved in {saved}, loaded as saved")
        for other, batch in ((asked, case.batch), (beside_half, cast(case.batch, torch.bfloat16))):
            answer = case.ask(other, memory, batch)
            assert bool(torch.isfinite(answer).all()), f"saved in {saved}: NaN or infinity"


def check_damaged_files_are_refused(case: Case) -> None:
    """Of a damaged, edited or missing file nothing is loaded, and the host is as it was."""
    host = case.make_host()
    case.ask(host)
    before = traces(host)
    with tempfile.TemporaryDirectory() as parent:
        good = os.path.join(parent, "good")
        case.trained().save_adapter(good, case.name)
        for damage in (_flip, _truncate, _edit, _rename, _remove):
            folder = os.path.join(parent, damage.__name__)
            shutil.copytree(good, folder)
            damage(folder)
            refuses(MmattnError, partial(load, host, folder, **case.options), f"a file after {damage.__name__[1:]}")
            no_trace(host, before, f"after {damage.__name__[1:]}")
        same(case.ask(host), case.host, "the host after files that were refused")
        model = case.fresh()
        refuses(AttachError, lambda: model.save_adapter(good, "nobody"), "save_adapter of one that is not there")
        with torch.no_grad():
            next(model.adapter(case.name).parameters()).view(-1)[:1].fill_(torch.nan)
        refuses(MmattnError, lambda: model.save_adapter(good, case.name), "save_adapter of NaN")
        load(host, good, case.name, **case.options)


def _flip(folder: str) -> None:
    with open(os.path.join(folder, TENSORS), "r+b") as file:
        file.seek(-3, os.SEEK_END)
        byte = file.read(1)
        file.seek(-3, os.SEEK_END)
        file.write(bytes([byte[0] ^ 4]))


def _truncate(folder: str) -> None:
    path = os.path.join(folder, TENSORS)
    os.truncate(path, os.path.getsize(path) // 2)


def _edit(folder: str) -> None:
    def enlarge(config: dict) -> None:
        settings = config["adapter"]
        sizes = [name for name, value in settings.items() if type(value) is int]
        settings["memory_dim" if "memory_dim" in settings else sizes[0]] += 1

    _rewrite(folder, enlarge)


def _rename(folder: str) -> None:
    _rewrite(folder, lambda config: config.update(kind="unheard_of"))


def _remove(folder: str) -> None:
    os.unlink(os.path.join(folder, CONFIG))


def _rewrite(folder: str, change: Callable[[dict], object]) -> None:
    path = os.path.join(folder, CONFIG)
    with open(path, encoding="utf-8") as file:
        config = json.load(file)
    change(config)
    with open(path, "w", encoding="utf-8") as file:
        json.dump(config, file)


CHECKS: list[Check] = [
    check_unload_leaves_no_trace,
    check_adapters_stack,
    check_merging,
    check_saved_is_loaded,
    check_any_saved_precision_is_loaded,
    check_damaged_files_are_refused,
]
