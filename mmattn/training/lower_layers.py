"""Frozen layers below the lowest adapter: their hidden states, computed once for each text; forwards start there.

No adapter acts there and nothing is trained there, so the hidden states are a function of the text alone, and a step of
training costs the upper layers.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from mmattn.adapters.host_models import device_of, given_cache
from mmattn.adapters.text_state import BOUNDARIES, PackedText, packed_text
from mmattn.errors import AdapterFileError, ConditionError, ConfigError, MmattnError, check_int
from mmattn.hosts.attach import adapted_model
from mmattn.hosts.causal_lm.generation import inputs_of
from mmattn.hosts.context import Keywords, LayerOutput, Method, Positional, step_of
from mmattn.hosts.host_state import HostState
from mmattn.hosts.model import AdaptedModel, adapted
from mmattn.hosts.peft import has_peft, inner_host
from mmattn.hosts.probe import bare_forward, is_close, random_ids
from mmattn.hosts.stored import shards, tensor_parallel_size
from mmattn.storage.json_files import parse_errors
from mmattn.storage.safetensors import read_tensors, write_tensors

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

#: Tokens of the texts of the probe.
LENGTHS = (7, 5)


class _Computed(Exception):
    """Ends a forward once the lower layers have run; holds their hidden states."""


#: The lower layers whose forward is skipped, with the hidden states (b, l, d) in their place; None to compute them.
_SKIPPED: ContextVar[tuple[LowerLayers | None, Tensor | None]] = ContextVar("mmattn_lower_layers", default=(None, None))


@contextlib.contextmanager
def wrapped_forwards(modules: Sequence[nn.Module], wrap: Callable[[nn.Module], Method]) -> Iterator[None]:
    """Replace the forward of each module inside the block; one of its own, such as accelerate's, comes back."""
    before = [vars(module).get("forward") for module in modules]
    for module in modules:
        vars(module)["forward"] = wrap(module)
    try:
        yield
    finally:
        for module, forward in zip(modules, before, strict=True):
            del vars(module)["forward"]
            if forward is not None:
                vars(module)["forward"] = forward


class LowerLayers:
    """The layers of a language model below everything that is trained."""

    def __init__(self, model: AdaptedModel, count: int) -> None:
        self.model, self.count = model, count
        self.layers = list(model.layers)
        host: PreTrainedModel = inner_host(model.host)
        # OPT calls the decoder inside its base model.
        self.reader: PreTrainedModel = host.get_decoder() or host.base_model
        #: Number of outputs of each of them, None for a tensor.
        self.outputs: dict[int, int | None] = {}
        self._state: HostState | None = None

    def installed(self) -> contextlib.AbstractContextManager[None]:
        """Let forwards skip these layers inside the block; they are run unless `starting_from` says otherwise."""
        lower = self.layers[: self.count]
        return wrapped_forwards(lower, lambda layer: partial(self._forward, lower.index(layer), layer.forward))

    @contextlib.contextmanager
    def skipped_by(self, states_for: Callable[[Positional, dict[str, object]], Tensor | None]) -> Iterator[None]:
        """Start forwards inside the block from the states for their arguments; run all layers where these are None."""

        def wrap(reader: nn.Module) -> Method:
            run = reader.forward

            @wraps(run)  # with its signature
            def forward(*args: Any, **kwargs: Any) -> Any:
                states = None if _SKIPPED.get() == (self, None) else states_for(args, kwargs)
                with contextlib.nullcontext() if states is None else self.starting_from(states):
                    return run(*args, **kwargs)

            return forward

        with self.installed(), wrapped_forwards([self.reader], wrap):
            yield

    @contextlib.contextmanager
    def starting_from(self, states: Tensor | None) -> Iterator[None]:
        """Start forwards inside the block from hidden states (b, l, d) after these layers; for None, end them there."""
        outer = _SKIPPED.set((self, states))
        try:
            yield
        finally:
            _SKIPPED.reset(outer)

    def _forward(
        self, number: int, forward: Callable[..., LayerOutput], *args: object, **kwargs: object
    ) -> LayerOutput:
        layers, states = _SKIPPED.get()
        if layers is not self:
            return forward(*args, **kwargs)
        if states is not None:
            outputs = self.outputs[number]
            return states if outputs is None else (states, *[None] * (outputs - 1))
        output = forward(*args, **kwargs)
        self.outputs[number] = len(output) if isinstance(output, tuple) else None
        if number == self.count - 1:
            raise _Computed(output[0] if isinstance(output, tuple) else output)
        return output

    @torch.no_grad()
    def compute(self, texts: Sequence[Tensor]) -> list[Tensor]:
        """Return the hidden states (l, d) of texts, ids (l,) each, in evaluation mode; inside `installed`."""
        ids, mask = (pad_sequence(rows, True) for rows in (list(texts), list(map(torch.ones_like, texts))))
        with bare_forward(self.model.host, self.model.open_blocks):
            together = self.states_of(input_ids=ids, attention_mask=mask, use_cache=False)
        return [states[: len(text)] for states, text in zip(together, texts, strict=True)]

    def states_of(self, **kwargs: object) -> Tensor:
        """Return the hidden states (b, l, d) in a call of the base model; inside `installed`."""
        try:
            with self.starting_from(None):
                self.reader(**kwargs)
        except _Computed as computed:
            return computed.args[0]
        raise ConditionError(f"layer {self.count - 1} of {type(self.model.host).__name__} was not run")

    def modules(self) -> dict[str, nn.Module]:
        """Return the modules of the base model that are not in upper layers."""
        upper = {part for layer in self.layers[self.count :] for part in layer.modules()}
        return {name: part for name, part in self.reader.named_modules() if part not in upper}

    def state(self) -> HostState:
        """Return with what they compute now: the same object until that changes."""
        if self._state is None or not self._state.holds():
            self._state = HostState(self.reader, self.modules())
        return self._state


def count_below(model: AdaptedModel) -> int:
    """Return the number of layers below the lowest adapter and the lowest trained parameter."""
    lowest = len(model.layers)
    for adapter in map(model.adapter, model.adapters):
        if adapter.traits.moves_text:
            return 0
        first: int = adapter.layers[0]
        lowest = min(lowest, first + (adapter.position == "after"))
    trained = (any(p.requires_grad for p in layer.parameters()) for layer in list(model.layers)[:lowest])
    return next((number for number, is_trained in enumerate(trained) if is_trained), lowest)


def lower_layers(model: nn.Module) -> LowerLayers:
    """Return the layers below the lowest adapter, after a check that forwards can start above them.

    Two texts run through the whole host and again from the hidden states: the logits must be equal bit for bit; from
    hidden states of each text alone, but for rounding.
    """
    if not isinstance(model, AdaptedModel) and has_peft(model) and not adapted(model):
        model = adapted_model(model, None)  # a LoRA alone
    elif not (isinstance(model, AdaptedModel) and model.predicts_tokens and model.adapters):
        raise ConfigError(
            f"hidden states are cached for a causal language model with adapters or a LoRA, got {type(model).__name__}:"
            " give an adapted model, or a peft model"
        )
    lower, (ids, mask) = _frozen_layers(model), _texts(model.host, 0)
    name, count = type(model.host).__name__, lower.count
    with torch.no_grad(), bare_forward(model.host, model.open_blocks), lower.installed():
        whole = _logits(model.host, ids, mask)
        states = lower.states_of(input_ids=ids, attention_mask=mask, use_cache=False)
    if not isinstance(states, Tensor) or states.shape[:-1] != ids.shape:
        raise ConditionError(
            f"layer {count - 1} of {name} returns no hidden states (b, l, d), so these cannot be cached"
        )
    try:
        with torch.no_grad(), bare_forward(model.host, model.open_blocks), lower.installed():
            _logits(model.host, *_texts(model.host, 1))  # so that states of the last text cannot help
            alone = torch.zeros_like(states)
            for row, length in enumerate(LENGTHS):
                alone[row, :length] = lower.compute([ids[row, :length]])[0]
            with lower.starting_from(states):
                again = _logits(model.host, ids, mask)
            with lower.starting_from(alone):
                near = _logits(model.host, ids, mask)
    except MmattnError:
        raise
    except Exception as error:
        raise ConditionError(
            f"{name} cannot run from the hidden states after layer {count - 1}, so these cannot be cached: "
            f"{type(error).__name__}: {error}"
        ) from error
    real = mask.bool()
    if not torch.equal(whole, again) or not is_close(near[real], whole[real]):
        raise ConditionError(
            f"{name} has other logits from the hidden states after layer {count - 1}, so these cannot be cached: upper "
            "layers read more of the lower ones; leave the cache out"
        )
    return lower


def _frozen_layers(model: AdaptedModel) -> LowerLayers:
    """Return the layers below all that is trained; raise if no layer can be skipped."""
    name, count = type(model.host).__name__, count_below(model)
    if not count:
        upper = tuple(range(len(model.layers) // 2, len(model.layers)))
        raise ConditionError(
            f"no layer of {name} is below all trained ones: an adapter acts at its first layer or before the text, or "
            f"a LoRA is there; give higher layers, such as layers={upper}"
        )
    if shards(model.host) or tensor_parallel_size(model.host) > 1:
        raise ConditionError(
            f"the weights of {name} lie in several processes, which must run every layer together: leave the cache "
            "out, or give each process the whole host"
        )
    lower = LowerLayers(model, count)
    if any(p.requires_grad for part in lower.modules().values() for p in part.parameters(recurse=False)):
        raise ConditionError(
            f"a parameter below layer {count} of {name} is trained (its embeddings, for one), so hidden states change "
            "with every step: freeze it, or leave the cache out"
        )
    return lower


def _texts(host: nn.Module, seed: int) -> tuple[Tensor, Tensor]:
    """Return two random texts of unequal length as ids (2, l) and attention mask."""
    ids = random_ids(host, len(LENGTHS), max(LENGTHS), torch.Generator().manual_seed(seed))
    mask = pad_sequence([ids.new_ones(length) for length in LENGTHS], True)
    return ids * mask, mask


def _logits(host: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    return host(input_ids=ids, attention_mask=mask, use_cache=False).logits


FORMAT = "mmattn-hidden-states"
#: Arguments on which the hidden states of a text do not depend, or that say where it begins.
_ARGUMENTS = {
    *("input_ids", "attention_mask", "position_ids", "cache_position", "use_cache", "labels", "shift_labels"),
    *("ignore_index", "num_items_in_batch", "return_loss", "logits_to_keep", "return_dict", "seq_idx"),
    *(*BOUNDARIES, "cu_seq_lens_k", "max_length_q", "max_length_k"),
}
_OUTPUTS = ("output_hidden_states", "output_attentions", "output_router_logits")


class HiddenStateCache:
    """Hidden states of the lower `layers` on the disk; counts the texts that were `found` there and `computed`."""

    def __init__(self, lower: LowerLayers, folder: Path, batch_size: int) -> None:
        self.lower, self.folder, self.batch_size = lower, folder, batch_size
        self.layers, self.found, self.computed = lower.count, 0, 0

    def states_for(self, args: Positional, kwargs: dict[str, object]) -> Tensor | None:
        """Return the cached hidden states for a forward of the host's base model; None if it runs all layers."""
        if torch.compiler.is_compiling():
            raise ConditionError(
                "a compiled host cannot read cached hidden states: leave torch_compile or the cache out"
            )
        texts = self._texts(args, kwargs)
        if texts is None:
            return None
        ids = inputs_of(args, kwargs)
        assert ids is not None
        kwargs["use_cache"] = False
        return self._states(texts, ids)

    def _texts(self, args: Positional, kwargs: Keywords) -> PackedText | None:
        """Return where the texts of a forward are, or None if it goes on with a cache, or packs without a memory."""
        step = step_of(self.lower.model)
        text = None if step is None else step.details
        if given_cache(kwargs) is not None or kwargs.get("use_cache") or (text is not None and text.prompt is not None):
            return None
        ids = _check_arguments(args, kwargs, self.lower.reader.config)
        packed = packed_text(kwargs, *ids.shape) if text is None else text.packed
        if packed is not None and text is None:
            return None  # nothing keeps the documents apart
        packed = packed or _rows(kwargs.get("attention_mask"), ids)
        if packed is not None:
            _check_positions(packed, kwargs.get("position_ids"), ids)
        return packed

    def _states(self, texts: PackedText, ids: Tensor) -> Tensor:
        """Return hidden states (b, l, d) after the lower layers, 0 on padding."""
        folder = self._folder()
        rows = [row[real] for row, real in zip(texts.unpack(ids), texts.real, strict=True)]
        keys = [hashlib.sha256(row.cpu().numpy().astype("<i8").tobytes()).hexdigest() for row in rows]
        files = {key: folder / key[:2] / f"{key}.safetensors" for key in keys}
        states = {key: _read(file) for key, file in files.items() if file.is_file()}
        missing = {key: row for key, row in zip(keys, rows, strict=True) if key not in states}
        self.found, self.computed = self.found + len(keys) - len(missing), self.computed + len(missing)
        order = sorted(missing, key=lambda key: len(missing[key]))  # little padding
        for start in range(0, len(order), self.batch_size):
            together = order[start : start + self.batch_size]
            computed = self.lower.compute([missing[key] for key in together])
            for key, row in zip(together, computed, strict=True):
                states[key] = row.to("cpu", copy=True)
                files[key].parent.mkdir(parents=True, exist_ok=True)
                write_tensors(files[key], {"states": states[key]}, {"format": FORMAT, "of": _of(files[key])})
        device = device_of(self.lower.layers[self.lower.count - 1])
        read = torch.cat([states[key].to(device, non_blocking=True) for key in keys])
        flat = read.new_zeros(ids.numel(), read.shape[1])
        flat[texts.tokens.to(device)] = read
        return flat.view(*ids.shape, -1)

    def _folder(self) -> Path:
        """Return the folder of the host as it is now, with a file for each text."""
        count = count_below(self.lower.model)
        if count < self.layers:
            raise ConditionError(
                f"hidden states after {self.layers} layers are cached, but something is trained in layer {count} by "
                "now: attach adapters and a LoRA before the cache is opened"
            )
        key = {
            "layers": self.layers,
            "attention": getattr(self.lower.reader.config, "_attn_implementation", None),
            "host": self.lower.state().digest_here,
        }
        return self.folder / hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]


def _read(file: Path) -> Tensor:
    """Return hidden states (l, d), of the text and the host that the file is named after."""
    with parse_errors(file, "hidden states"):
        tensors, metadata = read_tensors(file, FORMAT)
        if metadata.get("of") != _of(file):
            raise AdapterFileError(
                f"{str(file)!r} holds the hidden states of another text or host: remove it, and they are computed again"
            )
        return tensors["states"]


def _of(file: Path) -> str:
    """Return the host and the text of a file, as its folder and its name say."""
    return f"{file.parents[1].name}/{file.stem}"


def _check_arguments(args: Positional, kwargs: Keywords, config: PretrainedConfig) -> Tensor:
    """Return the ids (b, l) of a call, or refuse arguments on which hidden states may depend."""
    ids = inputs_of(args, kwargs)
    if ids is None or ids.is_floating_point() or len(args) > 1:
        raise _refused("the host was given embeddings, or arguments without names: give it input_ids=")
    others = [name for name in _OUTPUTS if kwargs.get(name, getattr(config, name, False))]
    for name, value in kwargs.items():
        if name not in _ARGUMENTS and name not in _OUTPUTS and (isinstance(value, Tensor) or bool(value)):
            others.append(name)
    if others:
        raise _refused(f"the host was called with {others[0]}, which reads or changes them: leave it out")
    return ids


def _rows(mask: Tensor | None, ids: Tensor) -> PackedText | None:
    """Return the text of each row; None where all is padding."""
    if mask is None:
        real = torch.ones_like(ids, dtype=torch.bool)
    elif mask.dim() == 2 and mask.shape == ids.shape:
        real = mask.bool().to(ids.device)
    else:
        raise _refused(f"attention_mask is {tuple(mask.shape)} and does not say which tokens are padding")
    if not bool(real.any()):
        return None
    rows = torch.arange(len(ids), device=ids.device)[:, None].expand_as(ids)
    return PackedText.of(rows.masked_fill(~real, -1))


def _check_positions(texts: PackedText, positions: Tensor | None, ids: Tensor) -> None:
    """Refuse texts that do not begin at position 0, or are not in one piece."""
    place = texts.places % ids.shape[1]
    count = torch.arange(texts.longest, device=place.device)
    at = place if positions is None else texts.unpack(positions.expand_as(ids))
    whole = (at == count) & (place - place[:, :1] == count)
    if not bool((whole | ~texts.real).all()):
        raise _refused(
            "a text does not stand at positions 0, 1, 2, …: pad on the right, or give position_ids=(b, l) that begin "
            "with 0 at the first token of each text"
        )


def _refused(reason: str) -> ConditionError:
    return ConditionError(f"hidden states are cached by the ids of a text, but {reason}")


@contextlib.contextmanager
def cached_hidden_states(
    model: nn.Module, folder: str | os.PathLike[str], *, batch_size: int = 1
) -> Iterator[HiddenStateCache]:
    """Cache hidden states: inside the block, the layers below all trained weights run once for each text.

    Their hidden states are cached on the disk, in a file for each text, and later forwards of the text start above
    them, with any trainer, order of rows, padding and packing, and in evaluation. The lower layers run in evaluation
    mode, without dropout. Weights, LoRA, config, dtype of autocast, and versions of torch and transformers are part of
    the key, so a changed host does not reuse states of another. Generation runs the whole host.

    With `batch_size=1` the cached states depend only on the text, so a run ends bit for bit the same with a full, an
    empty or a lost cache. It differs from a run without the cache by the rounding of another split into batches, and
    not at all if a batch is a single text.

    Args:
        model: a causal language model with all its adapters attached, or a peft model with a LoRA.
        folder: folder of the cache, for any number of runs. A token takes d numbers. You may remove folders of unused
            hosts at any time.
        batch_size: number of new texts that the lower layers read together. More are faster on a GPU, but the states
            then depend on the batch by rounding.

    Raises:
        ConditionError: no layer is below the lowest adapter, weights below it are trained, the host's weights are
            sharded over processes, or its answer from cached states differs (checked with a probe of a few tokens).
        ConfigError: not a language model with adapters or a LoRA.
        OSError: the folder cannot be written to.
        AdapterFileError: a file of the cache is damaged; remove it to compute it again.

    >>> import mmattn, tempfile
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> lm = LlamaForCausalLM(LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
    ...                                   num_attention_heads=4)).eval()
    >>> model = mmattn.attach(lm, mmattn.GatedAdapter(memory_dim=24, layers=[2, 3]))
    >>> ids, memory = torch.tensor([[5, 6, 7]]), mmattn.Memory(torch.randn(1, 11, 24))
    >>> whole = model(ids, memory=memory).logits
    >>> with tempfile.TemporaryDirectory() as folder, cached_hidden_states(model, folder) as cache:
    ...     answers = [torch.equal(model(ids, memory=memory).logits, whole) for _ in range(3)]
    >>> answers, cache.layers, cache.computed, cache.found
    ([True, True, True], 3, 1, 2)
    """
    lower = lower_layers(model)
    cache = HiddenStateCache(lower, Path(folder), check_int("batch_size", batch_size))
    with lower.skipped_by(cache.states_for):
        yield cache
