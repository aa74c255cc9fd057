"""Published weights for a language model: sizes of the host, and tensors of files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from mmattn.adapters.gated.pretrained import TextHost
from mmattn.adapters.language_models import depth_of, text_config, width_of
from mmattn.errors import AdapterFileError, AttachError

Weights = Mapping[str, Tensor] | str | PathLike[str]


def text_host(host: nn.Module) -> TextHost:
    """Return the sizes of the layers of a language model by its config."""
    config, depth = text_config(host), depth_of(host)
    if depth is None:
        raise AttachError(f"the config of {type(host).__name__} has no num_hidden_layers: is it a language model?")
    return TextHost(
        depth,
        width_of(host),
        getattr(config, "num_attention_heads", None),
        getattr(config, "rms_norm_eps", None),
        getattr(config, "hidden_act", None),
    )


class Files(Mapping[str, Tensor]):
    """The tensors of safetensors files, read when they are asked for.

    Raises:
        AdapterFileError: a file that is torn or something else, or a tensor in two files.
    """

    def __init__(self, paths: list[str]) -> None:
        from safetensors import SafetensorError, safe_open

        self._home: dict[str, Any] = {}
        for path in paths:
            try:
                file = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise AdapterFileError(f"{path!r} cannot be read as safetensors: {error}; fetch it again") from error
            twice = [name for name in file.keys() if name in self._home]  # noqa: SIM118
            if twice:
                raise AdapterFileError(f"{path!r} and another file beside it both hold {twice[:3]}; name one file")
            self._home.update(dict.fromkeys(file.keys(), file))

    def __getitem__(self, name: str) -> Tensor:
        value: Tensor = self._home[name].get_tensor(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._home)

    def __len__(self) -> int:
        return len(self._home)


def read_weights(weights: Weights) -> tuple[Mapping[str, Tensor], str]:
    """The tensors by name, and what messages call them; a `.bin`, `.pt` or `.pth` is unpickled with `weights_only`."""
    if isinstance(weights, Mapping):
        state: Any = weights
        source = "the state dict"
    else:
        path = os.fspath(weights)
        source = repr(path)
        if os.path.isdir(path):
            paths = sorted(os.path.join(path, name) for name in os.listdir(path) if name.endswith(".safetensors"))
            if not paths:
                raise AdapterFileError(f"{source} holds no safetensors file; name the file with the weights")
            return Files(paths), source
        if not path.endswith((".bin", ".pt", ".pth")):
            return Files([path]), source
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torn pickles raise all there is
            raise AdapterFileError(f"{source} cannot be read as weights: {error}; fetch it again") from error
    if not isinstance(state, Mapping) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in state.items()
    ):
        raise AdapterFileError(f"{source} must hold tensors by name, as a state dict does")
    return state, source
