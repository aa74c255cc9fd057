"""Hidden states of the frozen lower layers, computed once for each text: a training step costs the upper layers."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mmattn.adapters.host_models import device_of, given_cache
from mmattn.adapters.text_state import BOUNDARIES, PackedText, packed_text
from mmattn.errors import AdapterFileError, ConditionError, ConfigError, check_int
from mmattn.hosts.causal_lm.generation import inputs_of
from mmattn.hosts.context import Keywords, Positional, step_of
from mmattn.storage.json_files import parse_errors, validated
from mmattn.storage.safetensors import read_tensors, write_tensors
from mmattn.training.lower_layers import LowerLayers, count_below, lower_layers

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FORMAT = "mmattn-hidden-states"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Arguments on which the hidden states of a text do not depend, or that say where it begins.
_ARGUMENTS = {
    *("input_ids", "attention_mask", "position_ids", "cache_position", "use_cache", "labels", "shift_labels"),
    *("ignore_index", "num_items_in_batch", "return_loss", "logits_to_keep", "return_dict", "seq_idx"),
    *(*BOUNDARIES, "cu_seq_lens_k", "max_length_q", "max_length_k"),
}
_OUTPUTS = ("output_hidden_states", "output_attentions", "output_router_logits")


class HiddenStateCache:
    """Hidden states of the lower `layers` on the disk; counts the texts that were `found` there and `computed`."""

    def __init__(self, lower: LowerLayers, folder: Path, dtype: torch.dtype | None, batch_size: int) -> None:
        self.lower, self.folder, self.dtype, self.batch_size = lower, folder, dtype, batch_size
        self.layers, self.found, self.computed = lower.count, 0, 0

    def before(
        self, reader: nn.Module, args: Positional, kwargs: dict[str, object]
    ) -> tuple[Positional, dict[str, object]] | None:
        """Let a forward start from cached hidden states: a pre-hook of the host's base model."""
        if self.lower.is_computing():
            return None
        self.lower.run()  # torch runs no hooks after KeyboardInterrupt
        if torch.compiler.is_compiling():
            raise ConditionError(
                "a compiled host cannot read cached hidden states: leave torch_compile or the cache out"
            )
        texts = self._texts(args, kwargs)
        if texts is None:
            return None
        ids = inputs_of(args, kwargs)
        assert ids is not None
        self.lower.skip(self._states(texts, ids))
        return args, kwargs | {"use_cache": False}

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
            for key, one in zip(together, computed, strict=True):
                states[key] = one.to("cpu", self.dtype, copy=True), one.dtype
                files[key].parent.mkdir(parents=True, exist_ok=True)
                _write(files[key], *states[key])
        device = device_of(self.lower.layers[self.lower.count - 1])
        first, dtype = states[keys[0]]
        flat = torch.zeros(ids.numel(), first.shape[1], device=device, dtype=dtype)
        read = [states[key][0].to(device, non_blocking=True) for key in keys]
        flat[texts.tokens.to(device)] = torch.cat(read).to(dtype)
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
            "dtype": str(self.dtype),
            "attention": getattr(self.lower.reader.config, "_attn_implementation", None),
            "host": self.lower.state().digest_here,
        }
        return self.folder / hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]


def _write(file: Path, states: Tensor, dtype: torch.dtype) -> None:
    """Write hidden states (l, d) that the host computed in a dtype, with the text and the host that they are of."""
    metadata = {"format": FORMAT, "of": _of(file), "dtype": str(dtype).removeprefix("torch.")}
    write_tensors(file, {"states": states}, metadata)


def _read(file: Path) -> tuple[Tensor, torch.dtype]:
    """Return hidden states (l, d) and the dtype in which the host computed them."""
    with parse_errors(file, "hidden states"):
        tensors, metadata = read_tensors(file, FORMAT)
        if metadata.get("of") != _of(file):
            raise AdapterFileError(
                f"{str(file)!r} holds the hidden states of another text or host: remove it, and they are computed again"
            )
        return tensors["states"], getattr(torch, validated("dtype", str, metadata["dtype"]))


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
    model: nn.Module, folder: str | os.PathLike[str], *, dtype: torch.dtype | None = None, batch_size: int = 1
) -> Iterator[HiddenStateCache]:
    """Run the layers of a causal language model below everything that is trained once for each text inside the block.

    Their hidden states are cached on the disk, in a file for each text, and a forward that reads the text again begins
    above them: any trainer, order of rows, padding and packing, and evaluation alike. They are those of the evaluation
    mode, so dropout of the lower layers does not act. Weights, LoRA, config, dtype of autocast, and versions of torch
    and transformers are part of the key: a changed host computes its own. Generation runs the whole host.

    With `batch_size=1` what is cached is a function of the text alone, so that a run ends bit for bit the same whether
    the cache was full, empty, or lost with a killed process. From a run without the cache it differs as any two batches
    do that are split otherwise: by rounding, and by nothing where a batch is a single text.

    Args:
        model: a causal language model with adapters, all of which are attached, or the peft model of a LoRA alone.
        folder: of the cache, which may serve many runs. A token takes d numbers; folders of hosts that are no longer
            used may be removed at any time.
        dtype: in which hidden states are cached, float32, bfloat16 or float16; None for that of the host.
        batch_size: texts that the lower layers read together where several are not in the cache. More are quicker on an
            accelerator; hidden states then depend by rounding on the texts beside them.

    Raises:
        ConditionError: no layer is below the lowest adapter, something below it is trained, the host's weights lie in
            several processes, or it does not answer as before when it begins with these hidden states (a probe of a few
            tokens sees to it).
        ConfigError: no language model with adapters or a LoRA, or no such dtype.
        OSError: the folder cannot be written to.
        AdapterFileError: a file of the cache is damaged; remove it, and it is computed again.

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
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(map(str, DTYPES))}, got {dtype}")
    lower = lower_layers(model)
    cache = HiddenStateCache(lower, Path(folder), dtype, check_int("batch_size", batch_size))
    with lower.skipped_by(cache.before):
        yield cache
