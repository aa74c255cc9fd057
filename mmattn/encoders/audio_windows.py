"""Windows of long sounds: where each begins, which part of its states is its own, and which time each state has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Window:
    """A stretch of a sound, in samples from its beginning.

    Args:
        start: of its first sample.
        samples: (n,).
        first: where the part begins whose states are taken from this window.
        last: where that part ends.
        is_last: whether the sound ends with it.
    """

    start: int
    samples: Tensor
    first: float
    last: float
    is_last: bool


def cut(pieces: Iterable[Tensor], length: int, overlap: int) -> Iterator[Window]:
    """Cut a sound that arrives in pieces into windows of one length; a sound that is shorter is one window.

    The last window ends where the sound ends, and so begins earlier than the others would have it. Of an overlap the
    first half belongs to the window before and the second half to the window after, where either has more context.

    Args:
        pieces: (n,) each, one after the other.
        length: samples of a window.
        overlap: samples that a window shares with the one before it.

    Yields:
        Windows, each as soon as it is known that it is not the last.

    >>> [(w.start, len(w.samples), w.first, w.last) for w in cut([torch.zeros(11)], 5, 2)]
    [(0, 5, 0.0, 4.0), (3, 5, 4.0, 7.0), (6, 5, 7.0, 11.0)]
    """
    waiting, start, first = torch.zeros(0), 0, 0.0
    before = waiting
    for piece in pieces:
        waiting = torch.cat([waiting, piece])
        while len(waiting) > length:
            last = start + length - overlap / 2
            yield Window(start, waiting[:length], first, last, False)
            # As much of the past is held as the last window may reach back.
            before, waiting = waiting[: length - overlap], waiting[length - overlap :]
            start, first = start + length - overlap, last
    end = start + len(waiting)
    missing = min(length - len(waiting), len(before))
    samples = torch.cat([before[len(before) - missing :], waiting]) if missing else waiting
    yield Window(start - missing, samples, first, float(end), True)


@dataclass(frozen=True)
class Timeline:
    """Where the states of a model lie in time.

    Args:
        step: samples from one state to the next.
        bands: states of one time, as models of spectrograms have several.
    """

    step: float
    bands: int = 1

    def own(self, window: Window, steps: int) -> list[int]:
        """The states, counted in times, whose middle lies in the part of a window that is its own.

        Args:
            window: that was encoded.
            steps: times that have states.
        """
        middles = [window.start + (number + 0.5) * self.step for number in range(steps)]
        # The sound may end before the middle of its last state.
        return [
            number
            for number, middle in enumerate(middles)
            if window.first <= middle and (middle < window.last or window.is_last)
        ]

    def origins(self, window: Window, numbers: list[int], audio: int, sampling_rate: int) -> list[dict[str, object]]:
        """Of the states at some times, which sound each is of, and from which second to which.

        Args:
            window: that was encoded.
            numbers: of the times.
            audio: number of the sound.
            sampling_rate: samples in a second.
        """
        found: list[dict[str, object]] = []
        for number in numbers:
            start, end = ((window.start + (number + more) * self.step) / sampling_rate for more in (0, 1))
            span: dict[str, object] = {"audio": audio, "start": round(start, 4), "end": round(end, 4)}
            found += [span] if self.bands == 1 else [{**span, "band": band} for band in range(self.bands)]
        return found
