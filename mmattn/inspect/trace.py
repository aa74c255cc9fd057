"""`Trace`: the attention of the words of a text to their sources; its file in the folder of a run."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from mmattn.errors import AdapterFileError, ConfigError, NonFiniteError, ShapeError, check_choice
from mmattn.storage.json_files import parse_errors
from mmattn.storage.safetensors import read_tensors, write_tensors
from mmattn.tokenization import check_text

if TYPE_CHECKING:
    from PIL import Image

#: An image of Pillow, or the bytes of a JPEG.
Picture: TypeAlias = "Image.Image | bytes"
FORMAT = "mmattn-traces"
#: The name of the file in a run's folder.
FILE = "attention.safetensors"
#: Largest width or height of a stored picture, in pixels.
SIDE = 256
_TENSORS = ("weights", "probability", "without", "dropped")
_PICTURES = ("picture", "word_picture")


@dataclass(frozen=True, eq=False)
class Trace:
    """Attention weights between the l words of a text and s sources, in n layers of h heads.

    Args:
        words: l texts.
        sources: s names of patches, passages or tokens of another text.
        weights: (n, h, l, s), summed over the slots of a source.
        layers: names of the n layers.
        title: a line above it.
        queries: the side that attends, with weights that sum to at most 1: "words" to sources, or "sources" to words,
            like the patches of a picture drawn from a text.
        probability: (l,), the probability of each word.
        without: (l,), the same without a memory.
        dropped: (l, s), the same without each source.
        grid: rows and columns, if the sources are the patches of a picture, row by row.
        picture: the picture of `grid`, as a Pillow image, which is stored as a small JPEG, or as the bytes of a JPEG.
        word_grid: rows and columns, if the words are patches of a picture, too.
        word_picture: the picture of `word_grid`, as in `picture`.

    Raises:
        ShapeError: sizes that do not fit.
        ConfigError: `queries` is neither of the two.
        NonFiniteError: NaN or infinity.
        TextError: words, sources, layers or a title that are not texts.

    >>> trace = Trace(["a", "rose"], ["left", "right"], torch.tensor([[[[0.5, 0.5], [0.9, 0.1]]]]), ["layer 3"])
    >>> print(trace.draw(top=1))
    a
      ██████████             50.0 %  left
    rose
      ██████████████████     90.0 %  left
    """

    words: Sequence[str]
    sources: Sequence[str]
    weights: Tensor
    layers: Sequence[str]
    title: str = ""
    queries: str = "words"
    probability: Tensor | None = None
    without: Tensor | None = None
    dropped: Tensor | None = None
    grid: tuple[int, int] | None = None
    picture: Picture | None = None
    word_grid: tuple[int, int] | None = None
    word_picture: Picture | None = None

    def __post_init__(self) -> None:
        for name in ("words", "sources", "layers"):
            object.__setattr__(self, name, tuple(check_text(getattr(self, name))))
        check_text(self.title)
        check_choice("queries", self.queries, ("words", "sources"))
        l, s = len(self.words), len(self.sources)
        heads = self.weights.shape[1] if self.weights.dim() == 4 else "h"
        shapes = {
            "weights": (len(self.layers), heads, l, s),
            "probability": (l,),
            "without": (l,),
            "dropped": (l, s),
        }
        for name in _TENSORS:
            value = getattr(self, name)
            if value is None:
                continue
            if tuple(value.shape) != shapes[name]:
                raise ShapeError(
                    f"{name} of {len(self.layers)} layers, {l} words and {s} sources must be {shapes[name]}, "
                    f"got {tuple(value.shape)}"
                )
            if not torch.isfinite(value).all():
                raise NonFiniteError(f"{name} of a trace has NaN or infinity: check the model with doctor(...) first")
            object.__setattr__(self, name, value.detach().float().cpu())
        for grid, count, kind in ((self.grid, s, "sources"), (self.word_grid, l, "words")):
            if grid is not None and grid[0] * grid[1] != count:
                raise ShapeError(f"a grid of {grid[0]} × {grid[1]} patches does not fit {count} {kind}")
        for name in _PICTURES:
            value = getattr(self, name)
            if value is not None and not isinstance(value, bytes):
                object.__setattr__(self, name, small_jpeg(value))

    def mean(self) -> Tensor:
        """The weights (l, s) as the mean over layers and heads."""
        return self.weights.mean((0, 1))

    def labels(self) -> dict[str, object]:
        """The texts and grids, as JSON values."""
        names = ("title", "words", "sources", "layers", "queries", "grid", "word_grid")
        values = {name: getattr(self, name) for name in names}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def draw(self, top: int = 3, width: int = 20) -> str:
        """Return the trace as text: under each word a bar for the weight of each of its largest sources.

        If known, the change of the word's probability without the source follows it.

        Args:
            top: number of sources per word.
            width: length of a bar of weight 1, in characters.
        """
        lines = [self.title] if self.title else []
        for number, (word, row) in enumerate(zip(self.words, self.mean(), strict=True)):
            line = _plain(word)
            if self.probability is not None:
                line += f"  {self.probability[number]:.1%}".replace("%", " %")
                if self.without is not None:
                    line += f", {self.without[number]:.1%} without memory".replace("%", " %")
            lines.append(line)
            for source in row.argsort(descending=True, stable=True)[:top].tolist():
                share = row[source].item()
                text = f"  {_bar(share, width):<{width}}  {100 * share:5.1f} %  {_plain(self.sources[source])}"
                if self.dropped is not None and self.probability is not None:
                    change = (self.dropped[number, source] - self.probability[number]).item()
                    text += f"  {100 * change:+.1f} points if dropped"
                lines.append(text)
        return "\n".join(lines)


def save_traces(traces: Sequence[Trace], run: str | PathLike[str]) -> Path:
    """Write traces to `attention.safetensors` in a folder, replacing an existing file.

    Args:
        traces: one or more.
        run: the folder.

    Raises:
        ConfigError: no traces.
        OSError: the folder is missing or not writable.
    """
    if not traces:
        raise ConfigError("there are no traces to save: give one or more")
    tensors: dict[str, Tensor] = {}
    described = []
    for number, trace in enumerate(traces):
        for name in _TENSORS:
            if getattr(trace, name) is not None:
                tensors[f"{number}.{name}"] = getattr(trace, name)
        for name in _PICTURES:
            if getattr(trace, name) is not None:
                tensors[f"{number}.{name}"] = torch.frombuffer(bytearray(getattr(trace, name)), dtype=torch.uint8)
        described.append(trace.labels())
    file = Path(run) / FILE
    write_tensors(file, tensors, {"format": FORMAT, "traces": described})
    return file


def load_traces(run: str | PathLike[str]) -> list[Trace]:
    """The traces in the folder of a run.

    Args:
        run: the folder.

    Raises:
        AdapterFileError: there is no such file, or it is of a newer version, truncated or modified.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as run:
    ...     file = save_traces([Trace(["a"], ["left"], torch.ones(1, 1, 1, 1), ["layer 3"])], run)
    ...     [trace.words for trace in load_traces(run)]
    [('a',)]
    """
    file = Path(run) / FILE
    if not file.is_file():
        raise AdapterFileError(
            f"there is no {FILE} in {Path(run)}: train again with the recipe vision, rag, diffusion or translate, or "
            "call save_traces(traces, folder)"
        )
    tensors, about = read_tensors(file, FORMAT)
    with parse_errors(file, "traces"):
        return [_restored(number, labels, tensors) for number, labels in enumerate(about["traces"])]


def _restored(number: int, labels: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Trace:
    fields: dict[str, Any] = {name: tensors.get(f"{number}.{name}") for name in _TENSORS if name != "weights"}
    for name in _PICTURES:
        picture = tensors.get(f"{number}.{name}")
        fields[name] = None if picture is None else picture.numpy().tobytes()
    for name in ("grid", "word_grid"):
        fields[name] = None if labels[name] is None else (int(labels[name][0]), int(labels[name][1]))
    fields |= {name: labels[name] for name in ("words", "sources", "layers", "title", "queries")}
    return Trace(weights=tensors[f"{number}.weights"], **fields)


def small_jpeg(image: Image.Image) -> bytes:
    """A picture as the bytes of a small JPEG."""
    small, file = image.convert("RGB"), io.BytesIO()
    small.thumbnail((SIDE, SIDE))
    small.save(file, "JPEG", quality=88)
    return file.getvalue()


def _bar(share: float, width: int) -> str:
    eighths = round(8 * width * min(max(share, 0.0), 1.0))
    return "█" * (eighths // 8) + ("", *"▏▎▍▌▋▊▉")[eighths % 8]


def _plain(text: str) -> str:
    """A text on one line, without characters that move the cursor of a terminal."""
    return "".join(char if char.isprintable() else " " for char in text).strip() or repr(text)
