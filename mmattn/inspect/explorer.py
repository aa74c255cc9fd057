"""The page of `mmattn explore`: one HTML file, to be opened offline, with the attention of each word of some texts.

Traces are in it as JSON; a content security policy lets the browser load nothing and run only the page's own script.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from os import PathLike
from pathlib import Path
from string import Template
from typing import Any

import torch
from torch import Tensor

from mmattn.errors import ConfigError
from mmattn.inspect.trace import Trace
from mmattn.storage.files import write_text

#: Bytes of a page, at most.
LIMIT = 2_000_000
_HERE = Path(__file__).parent


def write_page(
    traces: Sequence[Trace] | Mapping[str, Sequence[Trace]],
    path: str | PathLike[str],
    *,
    heads: bool = False,
    title: str = "Attention by word",
) -> list[str]:
    """Write the page, under 2 MB; returns notes on what had to be left out for that, which the page shows too.

    Args:
        traces: one or more; or by the name of their group, under which they are listed.
        path: the file.
        heads: include the weights of every head and not only their mean.
        title: of the page.

    Raises:
        ConfigError: no traces, or a first one that does not fit.
        OSError: the folder is missing or not writable; a file that was there is unchanged.

    >>> import os, tempfile
    >>> trace = Trace(["a", "<b>"], ["left", "right"], torch.full((1, 3, 2, 2), 0.5), ["layer 3"])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_page([trace], os.path.join(folder, "page.html"))
    []
    """
    by_group = traces if isinstance(traces, Mapping) else {"": traces}
    groups = [name for name, some in by_group.items() for _ in some]
    selected = [one if heads else mean_of_heads(one) for some in by_group.values() for one in some]
    if not selected:
        raise ConfigError("there are no traces to show: give one or more")
    room = LIMIT - len(_page([], groups, [], title).encode()) - 1000
    selected, notes = fitted(selected, room)
    write_text(path, _page([described(trace) for trace in selected], groups, notes, title))
    return notes


def fitted(traces: Sequence[Trace], room: int) -> tuple[list[Trace], list[str]]:
    """The traces, reduced to a number of bytes, first by single heads and then by samples, and notes that say so."""
    selected, notes = list(traces), []
    if sum(map(_size, selected)) > room and any(trace.weights.shape[1] > 1 for trace in selected):
        selected = [mean_of_heads(trace) for trace in selected]
        notes.append("Single heads are left out, and their mean is shown: the page would be too large.")
    sizes = list(accumulate(map(_size, selected)))
    count = sum(size <= room for size in sizes)
    if not count:
        raise ConfigError(
            f"a sample takes {sizes[0]:,} bytes of {room:,}: give a shorter text, or fewer layers or sources"
        )
    if count < len(selected):
        notes.append(f"{count} of {len(selected)} samples are shown: the page would be too large.")
    return selected[:count], notes


def mean_of_heads(trace: Trace) -> Trace:
    """The trace with one head, the mean of all."""
    return replace(trace, weights=trace.weights.mean(1, keepdim=True))


def described(trace: Trace) -> dict[str, Any]:
    """The trace as JSON values, as the page's script reads it."""
    return {
        **trace.labels(),
        "heads": trace.weights.shape[1],
        "picture": _data_url(trace.picture),
        "word_picture": _data_url(trace.word_picture),
        "weights": _packed(trace.weights),
        "rollout": _packed(trace.rollout),
        "dropped": _packed(trace.dropped),
        "probability": _rounded(trace.probability),
        "without": _rounded(trace.without),
    }


def _data_url(picture: bytes | None) -> str | None:
    return None if picture is None else f"data:image/jpeg;base64,{base64.b64encode(picture).decode()}"


def _packed(shares: Tensor | None) -> str | None:
    """Numbers from 0 to 1 in 16 bits each, with an error of 0.000008 at most."""
    if shares is None:
        return None
    whole = (shares.clamp(0, 1) * 65535).round().to(torch.int32)
    pairs = torch.stack([whole & 255, whole >> 8], -1).to(torch.uint8)
    return base64.b64encode(pairs.contiguous().numpy().tobytes()).decode()


def _rounded(values: Tensor | None) -> list[float] | None:
    return None if values is None else [round(value, 6) for value in values.tolist()]


def _json(value: object) -> str:
    """JSON in which no HTML parser sees a tag or the end of a script."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _size(trace: Trace) -> int:
    return len(_json(described(trace)).encode()) + 1


def _page(described: list[dict[str, Any]], groups: list[str], notes: list[str], title: str) -> str:
    style, script = (_HERE.joinpath(f"explorer.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    policy = f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}"
    return Template(_HERE.joinpath("explorer.html").read_text(encoding="utf-8")).substitute(
        title=title.replace("&", "&amp;").replace("<", "&lt;"),
        policy=policy,
        style=style,
        script=script,
        data=_json({"notes": notes, "groups": groups, "traces": described}),
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
