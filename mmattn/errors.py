"""The exception classes of the package, and the checks that word their messages.

Every message says what was asked, what was given, why it fails and what to do. The classes derive from the standard
types, so `except ValueError` keeps working for those who do not know ours.
"""

from __future__ import annotations

import importlib
import math
from types import ModuleType

import torch
from torch import Tensor


class MmattnError(Exception):
    """Root of every error this package raises on purpose."""


class MaskError(MmattnError, TypeError):
    """A mask that is not boolean with True = may look."""


class ShapeError(MmattnError, ValueError):
    """Sizes that do not fit together."""


class ConfigError(MmattnError, ValueError):
    """A setting outside what is allowed."""


class NonFiniteError(MmattnError, ValueError):
    """NaN or infinity where numbers were expected."""


class AttachError(MmattnError, ValueError):
    """An adapter that cannot be put on this host as asked."""


class ConditionError(MmattnError, RuntimeError):
    """A memory that cannot reach the host in this state or at this moment."""


class AdapterFileError(MmattnError, ValueError):
    """A file that is not what it should be; nothing was changed."""


class IndexMismatchError(MmattnError, ValueError):
    """A query, entries, ids, index or encoder that do not belong together."""


class IndexFileError(MmattnError, ValueError):
    """A saved index that is not what it should be; nothing was changed."""


class ImageError(MmattnError, ValueError):
    """A picture that cannot be read."""


class TextError(MmattnError, ValueError):
    """A text that cannot be tokenised as asked."""


class MissingExtraError(MmattnError, ImportError):
    """An optional dependency that is not installed."""


def import_extra(module: str, extra: str) -> ModuleType:
    """Import an optional dependency, or say which extra brings it.

    Raises:
        MissingExtraError: `module` is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
        raise MissingExtraError(
            f"{module} is needed here and is not installed; install it with: pip install 'mmattn[{extra}]'"
        ) from error


def check_int(name: str, value: object, *, at_least: int = 1, at_most: int | None = None) -> int:
    """Return `value` if it is an int (not a bool) of at least `at_least`.

    Raises:
        ConfigError: it is anything else.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be an int, got {value!r} ({type(value).__name__})")
    if value < at_least:
        raise ConfigError(f"{name} must be at least {at_least}, got {value}")
    if at_most is not None and value > at_most:
        raise ConfigError(f"{name} must be at most {at_most}, got {value}")
    return value


def check_float(name: str, value: object, *, at_least: float = -math.inf, below: float = math.inf) -> float:
    """Return `value` as a float if it is a finite number in [at_least, below).

    Raises:
        ConfigError: it is anything else.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(f"{name} must be a finite number, got {value!r}")
    if not at_least <= value < below:
        raise ConfigError(f"{name} must be in [{at_least}, {below}), got {value}")
    return float(value)


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    """Return `value` if it is one of `choices`.

    Raises:
        ConfigError: it is not.
    """
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}")
    return value


def check_bool_mask(name: str, mask: object) -> Tensor:
    """Return `mask` if it is a boolean tensor; name the converter otherwise.

    Raises:
        MaskError: a mask of another dtype (float 0/1, int, additive), or not a tensor.
    """
    if not isinstance(mask, Tensor):
        raise MaskError(f"{name} must be a bool tensor, True = attend; got {type(mask).__name__}")
    if mask.dtype != torch.bool:
        raise MaskError(
            f"{name} must be bool, True = attend; got {str(mask.dtype).removeprefix('torch.')}. Convert it by name: "
            "mmattn.masks.from_huggingface (1 = keep), from_additive (0 = keep, -inf = drop), "
            "from_key_padding (nn.MultiheadAttention, True = drop)"
        )
    return mask
