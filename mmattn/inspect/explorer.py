"""The page of `mmattn explore`: one HTML file, to be opened offline, with the attention of each word of some texts.

Traces are in it as JSON; a content security policy lets the browser load nothing and run only the page's own script.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import accumulate
from os import PathLike
from pathlib import Path
from string import Template

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
    groups = [name for name, group in by_group.items() for _ in group]
    samples = [_described(trace, heads) for group in by_group.values() for trace in group]
    if not samples:
        raise ConfigError("there are no traces to show: give one or more")
    room = LIMIT - len(_page([], groups, [], title).encode()) - 1000
    sizes = list(accumulate(len(_json(sample).encode()) + 1 for sample in samples))
    count = sum(size <= room for size in sizes)
    if not count:
        raise ConfigError(
            f"a sample takes {sizes[0]:,} bytes of {room:,}: give a shorter text, or fewer layers, heads or sources"
        )
    notes = []
    if count < len(samples):
        notes.append(f"{count} of {len(samples)} samples are shown: the page would be too large.")
    write_text(path, _page(samples[:count], groups, notes, title))
    return notes


def _described(trace: Trace, heads: bool) -> dict[str, object]:
    """Return a trace as JSON values, as the page's script reads it; without `heads`, the mean of them."""
    weights = trace.weights if heads else trace.weights.mean(1, keepdim=True)
    return {
        **trace.labels(),
        "heads": weights.shape[1],
        "picture": data_url(trace.picture),
        "word_picture": data_url(trace.word_picture),
        "weights": _packed(weights),
        "dropped": _packed(trace.dropped),
        "probability": _rounded(trace.probability),
        "without": _rounded(trace.without),
    }


def data_url(picture: object) -> str | None:
    return None if not isinstance(picture, bytes) else f"data:image/jpeg;base64,{base64.b64encode(picture).decode()}"


def _packed(shares: Tensor | None) -> str | None:
    """Pack numbers from 0 to 1 in 16 bits each, with an error of 0.000008 at most."""
    if shares is None:
        return None
    whole = (shares.clamp(0, 1) * 65535).round().to(torch.int32)
    pairs = torch.stack([whole & 255, whole >> 8], -1).to(torch.uint8)
    return base64.b64encode(pairs.contiguous().numpy().tobytes()).decode()


def _rounded(values: Tensor | None) -> list[float] | None:
    return None if values is None else [round(value, 6) for value in values.tolist()]


def _json(value: object) -> str:
    """Return JSON in which no HTML parser sees a tag or the end of a script."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _page(samples: list[dict[str, object]], groups: list[str], notes: list[str], title: str) -> str:
    style, script = (_HERE.joinpath(f"explorer.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    policy = f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}"
    return Template(_HERE.joinpath("explorer.html").read_text(encoding="utf-8")).substitute(
        title=title.replace("&", "&amp;").replace("<", "&lt;"),
        policy=policy,
        style=style,
        script=script,
        data=_json({"notes": notes, "groups": groups, "traces": samples}),
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
