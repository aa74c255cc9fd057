"""How the pages of a bank hold keys and values: in a floating point dtype, or quantised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from mmattn.core.paged_cache import side_by_side
from mmattn.core.quantization import QUANTIZATIONS, Quantization, QuantizedPages
from mmattn.errors import ConfigError
from mmattn.storage.safetensors import DTYPES, NAMES


@dataclass(frozen=True)
class FloatPages:
    """Tables of keys and of values as they are.

    Args:
        dtype: of the tables; None for that of the weights.
    """

    dtype: torch.dtype | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the tables of a layer."""
        return "keys", "values"

    def encode(self, keys: Tensor, values: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Rows of the tables for some entries.

        Args:
            keys: (n, g, m, k).
            values: (n, g, m, k).
            mask: (n, m) bool.
        """
        return {"keys": keys.to(self.dtype or keys.dtype), "values": values.to(self.dtype or values.dtype)}

    def gather(
        self, tables: Mapping[str, Tensor], rows: Tensor, real: Tensor | None, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of some entries, as `side_by_side` lays them out.

        Args:
            tables: of a layer, by the names in `parts`.
            rows: (b, n), which entries.
            real: (b, n·m) bool, which slots; None for all.
            device: of keys and values.
            dtype: of keys and values.
        """
        keys, values = (side_by_side(tables[part], rows, real).to(device, dtype) for part in self.parts)
        return keys, values


PageFormat = FloatPages | QuantizedPages


def page_format(dtype: torch.dtype | None, quantization: str | None) -> PageFormat:
    """The format that was asked for.

    Args:
        dtype: of plain pages; None for that of the weights.
        quantization: "int8" or "int4"; None for plain pages.

    Raises:
        ConfigError: a dtype that is not floating point, a quantisation that is not offered, or both.
    """
    if quantization is None:
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ConfigError(
                f"keys and values are cached in a floating point dtype, got {dtype!r}: for fewer bytes give "
                f"quantization={' or '.join(map(repr, QUANTIZATIONS))}"
            )
        return FloatPages(dtype)
    if quantization not in QUANTIZATIONS:
        raise ConfigError(
            f"keys and values were to be cached with quantization={quantization!r}, and there is "
            f"{', '.join(map(repr, QUANTIZATIONS))}: give one of these, or dtype=torch.bfloat16"
        )
    if dtype is not None:
        raise ConfigError(
            f"dtype={dtype} is for plain pages, and quantization={quantization!r} was asked for: leave one of them out"
        )
    return QuantizedPages(cast("Quantization", quantization))


def describe_format(form: PageFormat) -> dict[str, str | None]:
    """What a file says of its pages.

    Args:
        form: of the pages.
    """
    if isinstance(form, QuantizedPages):
        return {"dtype": None, "quantization": form.quantization}
    return {"dtype": None if form.dtype is None else NAMES[form.dtype], "quantization": None}


def described_format(metadata: Mapping[str, Any]) -> PageFormat:
    """The format of the pages in a file.

    Args:
        metadata: of the file; that of an older one says nothing of quantisation.

    Raises:
        ConfigError: no format that pages can have.
    """
    named, quantization = metadata.get("dtype"), metadata.get("quantization")
    if named is not None and str(named) not in DTYPES:
        raise ConfigError(f"keys and values are cached in a floating point dtype, got {named!r}")
    return page_format(None if named is None else DTYPES[str(named)], quantization)
