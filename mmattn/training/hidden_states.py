"""Hidden states of the frozen lower layers, computed once for each text: a step of training costs the upper ones."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmattn.adapters.language_models import device_of
from mmattn.core.tensor_cache import autocast_dtype
from mmattn.errors import ConditionError, ConfigError, check_int
from mmattn.hosts.causal_lm.lower_layers import LowerLayers, count_below
from mmattn.hosts.causal_lm.lower_layers_probe import lower_layers
from mmattn.hosts.causal_lm.texts_read import TextsRead, texts_read
from mmattn.training.tensor_store import TensorStore

FORMAT = "mmattn-hidden-states"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of a config, what changes no hidden state.
_NAMES = ("_name_or_path", "transformers_version", "use_cache", "architectures", "dtype", "torch_dtype")


class HiddenStateCache:
    """What the lower layers of a language model compute of texts, on the disk; `cached_hidden_states` makes it.

    Attributes:
        layers: number of the lower layers.
        found: texts whose hidden states were in the cache.
        computed: texts whose hidden states were not.
    """

    def __init__(self, lower: LowerLayers, folder: Path, dtype: torch.dtype | None, batch_size: int) -> None:
        self.lower, self.folder, self.dtype, self.batch_size = lower, folder, dtype, batch_size
        self.layers, self.found, self.computed = lower.count, 0, 0
        config: Any = getattr(lower.reader, "config", None)
        self._about = {
            "layers": self.layers,
            "config": {} if config is None else {k: v for k, v in config.to_dict().items() if k not in _NAMES},
            "dtype": str(dtype),
            "torch": torch.__version__,
            "transformers": version("transformers"),
        }
        self._stores: dict[str, TensorStore] = {}

    def nbytes(self) -> int:
        """Bytes on the disk of the hidden states of the host as it is."""
        return self._store().nbytes()

    def flush(self) -> None:
        """Write what was computed and is not yet on the disk.

        Raises:
            OSError: the disk is full; what is on it stays.
        """
        for store in self._stores.values():
            store.flush()

    # One forward ----------------------------------------------------------------------------------------------------

    def before(self, reader: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward pre-hook of the part of the host that is given the text."""
        if self.lower.is_computing():
            return None
        self.lower.end()  # torch runs no hooks after KeyboardInterrupt
        if torch.compiler.is_compiling():
            raise ConditionError(
                "the host is being compiled, and a graph cannot read cached hidden states: compile the adapters only, "
                "with TrainingConfig(torch_compile=True)"
            )
        texts = texts_read(self.lower.model, self.lower.reader.config, args, kwargs)
        if texts is None:
            return None
        self.lower.begin_with(self._states(texts))
        return args, kwargs | {"use_cache": False}

    def after(self, reader: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """A forward hook of the same part, which is called after a failure, too."""
        self.lower.end()

    def _states(self, texts: TextsRead) -> Tensor:
        """Hidden states (b, l, d) after the lower layers."""
        store = self._store()
        keys = [hashlib.sha256(ids.cpu().numpy().astype("<i8").tobytes()).hexdigest() for ids in texts.ids]
        states = {key: found for key in keys if (found := store.get(key)) is not None}
        missing = {key: ids for key, ids in zip(keys, texts.ids, strict=True) if key not in states}
        self.found, self.computed = self.found + len(keys) - len(missing), self.computed + len(missing)
        # Of like length together, with little padding.
        order = sorted(missing, key=lambda key: len(missing[key]))
        for start in range(0, len(order), self.batch_size):
            together = order[start : start + self.batch_size]
            computed = self.lower.compute([missing[key] for key in together])
            for key, one in zip(together, computed, strict=True):
                states[key] = store.put(key, one if self.dtype is None else one.to(self.dtype))
        device = device_of(self.lower.layers[self.lower.count - 1])
        return texts.in_rows([states[key] for key in keys], device, self.lower.dtype)

    def _store(self) -> TensorStore:
        """The store of the host as it is now."""
        count, device = count_below(self.lower.model), device_of(self.lower.reader)
        if count < self.layers:
            raise ConditionError(
                f"hidden states after {self.layers} layers are cached, and something is trained in layer {count} by "
                "now: attach adapters and a LoRA before the cache is opened"
            )
        config = getattr(self.lower.reader, "config", None)
        about = self._about | {
            "weights": self.lower.fingerprint(),
            "attention": getattr(config, "_attn_implementation", None),
            "autocast": str(autocast_dtype(device)),
            "device": device.type,
        }
        name = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()[:24]
        if name not in self._stores:
            self._stores[name] = TensorStore(self.folder / name, FORMAT)
        return self._stores[name]


@contextlib.contextmanager
def cached_hidden_states(
    model: Any, folder: str | os.PathLike[str], *, dtype: torch.dtype | None = None, batch_size: int = 1
) -> Iterator[HiddenStateCache]:
    """Inside the block a causal language model runs the layers below its lowest adapter once for each text.

    Their hidden states are cached on the disk under the ids of the text, and a forward that reads the text again begins
    above them: any trainer, order of rows, padding and packing, and evaluation alike. They are those of the evaluation
    mode, so dropout of the lower layers does not act. Weights, LoRA, config, dtype of autocast, and versions of torch
    and transformers are part of the key: a changed host computes its own. Generation runs the whole host.

    With `batch_size=1` what is cached is a function of the text alone, so that a run ends bit for bit the same whether
    the cache was full, empty, or lost with a killed process. From a run without the cache it differs as any two batches
    do that are split otherwise: by rounding, and by nothing where a batch is a single text.

    Args:
        model: a causal language model with adapters, all of which are attached.
        folder: of the cache, which may serve many runs. A token takes d numbers; folders of hosts that are no longer
            used may be removed at any time.
        dtype: in which hidden states are cached, float32, bfloat16 or float16; None for that of the host.
        batch_size: texts that the lower layers read together where several are not in the cache. More are quicker on an
            accelerator; hidden states then depend by rounding on the texts beside them.

    Raises:
        ConditionError: no layer is below the lowest adapter, something below it is trained, the host's weights lie in
            several processes, or it does not answer as before when it begins with these hidden states (a probe of a few
            tokens sees to it).
        ConfigError: no language model with adapters, or no such dtype.
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
        raise ConfigError(f"hidden states are cached in {', '.join(map(str, DTYPES))}, and {dtype} was asked for")
    lower = lower_layers(model)
    cache = HiddenStateCache(lower, Path(folder), dtype, check_int("batch_size", batch_size))
    hooks = [
        lower.reader.register_forward_pre_hook(cache.before, with_kwargs=True),
        lower.reader.register_forward_hook(cache.after, always_call=True),
    ]
    try:
        with lower.installed():
            yield cache
    finally:
        for hook in hooks:
            hook.remove()
        lower.end()
        cache.flush()
