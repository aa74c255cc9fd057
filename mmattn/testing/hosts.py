"""`HostCase`, and the checks of a kind of host with adapters at every position that it offers."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest import SkipTest

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mmattn.adapters.protocols import POSITIONS, Site
from mmattn.adapters.settings import AdapterConfig
from mmattn.adapters.text_state import TextState
from mmattn.errors import AttachError, ConditionError
from mmattn.hosts.attach import adapted_model, attach, host_kind, host_kinds
from mmattn.hosts.context import Call
from mmattn.hosts.model import AdaptedModel
from mmattn.inspect.doctor.run import doctor, random_batch
from mmattn.testing.case import Case, MakeHost, answer_of, differ, no_trace, refuses, same, stir, traces


class HostCase(Case):
    """A kind of host, and adapters for every position that it offers.

    Args:
        make_host: as in `Case`.
        adapters: settings of registered kinds, whose blocks should be at many layers.
        rows: b, at least 2.
        options: further arguments of `attach`.
    """

    def __init__(self, make_host: MakeHost, adapters: Sequence[AdapterConfig], rows: int = 3, **options: Any) -> None:
        super().__init__(adapters[0], make_host, rows=rows, **options)
        self.adapters = list(adapters)

    def bare(self) -> AdaptedModel:
        """The adapted model of a new host, as `attach` makes it before any adapter is on."""
        return adapted_model(self.make_host(), self.options.get("path"))


def positions_of(case: HostCase) -> list[str]:
    """The positions that this host has; one that its kind offers and it has not is refused in words."""
    model, positions = case.bare(), []
    for position in type(model).positions:
        try:
            model.sites(position)
        except AttachError as error:
            assert str(error), f"sites {position!r} are refused without words"
            continue
        positions.append(position)
    assert positions, "the host has no sites"
    return positions


def check_it_is_recognised(case: HostCase) -> None:
    """Its kind is registered, matches the model, and is the one that `attach` takes; what is no model is refused."""
    model = case.fresh()
    kind = host_kinds().get(type(model).kind, AdaptedModel)
    assert kind is type(model), f"no {type(model).__name__} is registered as {type(model).kind!r}"
    assert kind.matches(case.make_host()), f"{kind.__name__}.matches says no"
    assert host_kind(case.make_host()) is kind, "attach takes another kind"
    assert kind.positions and set(kind.positions) <= set(POSITIONS), f"positions are {kind.positions}"
    refuses(AttachError, lambda: attach("a name", case.adapter), "a string as host")  # type: ignore[arg-type]
    host = case.make_host()
    before = traces(host)
    refuses(AttachError, lambda: attach(host, object()), "settings of no kind")  # type: ignore[arg-type]
    no_trace(host, before, "after settings were refused")


def check_sites(case: HostCase) -> None:
    """Its sites of each position name modules with width and device of what is there, each part in forward order."""
    model = case.bare()
    for position in positions_of(case):
        sites = model.sites(position)
        assert sites, f"no sites {position!r}"
        assert [site.layer for site in sites] == list(range(len(sites))), f"layers {[site.layer for site in sites]}"
        assert all(site.position == position for site in sites), f"sites of other positions among those {position!r}"
        passed = _passed_at(case, model.host, sites)
        assert set(passed) == {site.layer for site in sites}, f"the forward passes {list(passed)} of sites {position!r}"
        for part in {site.part for site in sites}:
            order = [layer for layer in passed if sites[layer].part == part]
            right = position == "inside" or order == sorted(order)
            assert right, f"the forward passes sites {position!r} of {part or 'the host'} in the order {order}"
        for site in sites:
            _check_site(site, passed[site.layer])


def _check_site(site: Site, states: Tensor) -> None:
    if site.position in ("inside", "joined"):
        assert site.heads is not None and site.width >= 1, f"{site} does not tell the sizes of its attention"
        return
    assert states.shape[-1] == site.width and states.dim() == 3, f"{site}: states are {tuple(states.shape)}"
    assert states.device == site.device, f"{site}: states are on {states.device}"


def _passed_at(case: HostCase, host: nn.Module, sites: Sequence[Site]) -> dict[int, Tensor]:
    """The hidden states at each site, by its layer, in the order in which one forward of the host passes them."""
    passed: dict[int, Tensor] = {}

    def listen(site: Site) -> RemovableHandle:
        def before(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            passed[site.layer] = args[0] if args else kwargs["hidden_states"]

        def after(module: nn.Module, args: tuple[Tensor, ...], output: object) -> None:
            passed[site.layer] = answer_of(output)

        module = host.get_submodule(site.module)
        if site.position == "before":
            return module.register_forward_pre_hook(before, with_kwargs=True)
        return module.register_forward_hook(after)

    hooks = [listen(site) for site in sites]
    case.ask(host)
    for hook in hooks:
        hook.remove()
    return passed


def check_every_site_reaches_the_answer(case: HostCase) -> None:
    """A block at any one site reaches the host's answer in every row, at every position."""
    offered = set(positions_of(case))
    for adapter in case.adapters:
        single = Case(adapter, case.make_host, rows=case.rows, **case.options)
        model = single.fresh()
        position = model.adapter(single.name).position
        offered.discard(position)
        memory = single.memory()
        for layer in model.adapter(single.name).layers:
            one = single.fresh()
            stir(one.adapter(single.name).block(layer))
            differ(single.ask(one, memory), single.host, f"a block {position} layer {layer} alone")
    assert not offered, f"give an adapter for each position that is offered, also for {sorted(offered)}"


def check_layers_that_are_not_there(case: HostCase) -> None:
    """Layers that the host does not have are refused in words, and nothing has changed."""
    adapter: Any = case.adapter
    names = {field.name for field in fields(adapter)}
    if "layers" not in names:
        raise SkipTest("the adapter's settings do not name layers")
    host = case.make_host()
    before, depth = traces(host), len(case.bare().sites(type(case.bare()).positions[0]))
    wrong = replace(adapter, layers=(0, depth), **({"every": None} if "every" in names else {}))
    refuses(AttachError, lambda: attach(host, wrong, **case.options), f"layer {depth} of {depth}")
    no_trace(host, before, "after layers were refused")
    same(case.ask(host), case.host, "the host after layers were refused")


def check_checkpoint_is_untouched(case: HostCase) -> None:
    """The host's modules, `state_dict` and `save_pretrained` are those of a host without adapters."""
    untouched, model = case.make_host(), case.trained()
    host = model.host
    case.ask(model, case.memory())
    assert [name for name, _ in host.named_modules()] == [name for name, _ in untouched.named_modules()]
    state, expected = host.state_dict(), untouched.state_dict()
    assert list(state) == list(expected), f"other keys: {set(state) ^ set(expected)}"
    for name, value in expected.items():
        same(state[name], value, name)
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for number, one in enumerate((untouched, host)):
            path, save = os.path.join(folder, str(number)), getattr(one, "save_pretrained", None)
            if save is None:
                return
            save(path)
            files.append({file.name: file.read_bytes() for file in sorted(Path(path).iterdir())})
    changed = [file for file in {**files[0], **files[1]} if files[0].get(file) != files[1].get(file)]
    assert not changed, f"save_pretrained writes other files: {changed}"


def check_text_state(case: HostCase) -> None:
    """`text_state` tells the rows of a call, and where adapters act on hidden states (b, l, d) its tokens."""
    model = case.fresh()
    text = model.text_state(Call({}), (), case.batch)
    assert isinstance(text, TextState), f"text_state gives a {type(text).__name__}"
    assert text.rows == case.rows, f"it tells {text.rows} rows of a batch of {case.rows}"
    site = model.adapter(case.name).sites[0]
    if site.position != "inside" and not model.is_apart(site.layer):
        states = _passed_at(case, case.make_host(), [site])[site.layer]
        assert text.length == states.shape[1], f"it tells {text.length} tokens of {states.shape[1]}"


def check_example_batch(case: HostCase) -> None:
    """`example_batch` is what the host is called with, the same for the same generator, and enough for the doctor."""
    first, again = case.another_batch(5), case.another_batch(5)
    assert list(first) == list(again), "the same generator gives other names"
    same(case.ask(case.make_host(), batch=first), case.ask(case.make_host(), batch=again), "the same generator")
    answer = case.ask(case.make_host(), batch=first)
    assert len(answer) == case.rows, f"a batch of {case.rows} rows is answered with {len(answer)}"
    differ(case.ask(case.make_host(), batch=case.another_batch(6)), answer, "another generator")
    model = case.trained()
    report = doctor(model, random_batch(model, case.name))
    assert report.ok, f"a trained adapter is found ill:\n{report}"


def check_second_attach(case: HostCase) -> None:
    """A second `attach`, on host or model, puts another adapter beside the first; a taken name is refused."""
    model, memory = case.trained(), case.memory()
    answer = case.ask(model, memory)
    refuses(AttachError, lambda: attach(model.host, case.adapter, case.name), "the same name")
    refuses(AttachError, lambda: attach(model.host, case.adapter, "no.name"), "a name with a dot")
    assert list(model.adapters) == [case.name], f"after names were refused there are {list(model.adapters)}"
    same(case.ask(model, memory), answer, "after names were refused")
    for number, host in enumerate((model.host, model)):
        assert attach(host, case.adapter, f"more{number}") is model, "attach gives another object than the first time"
    same(case.ask(model, {case.name: memory}), answer, "beside two fresh ones")
    refuses(ConditionError, lambda: (model.unload(), model.prepare(memory), case.ask(model, memory)), "after unload")
