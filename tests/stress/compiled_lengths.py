"""Ask one compiled host with memories of many lengths, and see how often it is compiled again.

    python -m tests.stress.compiled_lengths [LENGTHS]

The host is one graph, and the compiler's own limit of recompilations holds: a break or that limit is an error. Each
length from 2 up comes with a mask and without one, in an order of its own; then come memories of one slot, for which
this compiler has graphs of their own, and no memory. Prints one line and exits with 1 on such an error, or if an answer
differs from that of the host as it is.
"""

from __future__ import annotations

import random
import sys

import torch
from torch._dynamo.testing import CompileCounterWithBackend

import mmattn
from tests import tiny

ROWS = 3


def memory_of(m: int, masked: bool) -> mmattn.Memory:
    """A memory of m slots; with a mask one of its rows has none."""
    return tiny.memory(ROWS, m=m, lengths=[m, 0, (m + 1) // 2] if masked else None, seed=m)


@torch.no_grad()
def main(lengths: int = 50) -> int:
    torch._dynamo.reset()
    compiler = CompileCounterWithBackend("eager")
    model, ids = tiny.attach(tiny.make("llama", num_hidden_layers=1), layers=(0,)), tiny.text(ROWS)
    fast = torch.compile(model.host, backend=compiler, fullgraph=True)

    def error(memory: mmattn.Memory | None) -> float:
        with model.condition(memory):
            got = fast(ids).logits
        want = model(ids, memory=memory).logits
        assert torch.isfinite(got).all() and torch.isfinite(want).all()
        return float((got - want).abs().max() / want.abs().max())

    given = [(m, masked) for m in range(2, lengths + 2) for masked in (False, True)]
    random.Random(0).shuffle(given)
    worst = max(error(memory_of(m, masked)) for m, masked in given)
    graphs = compiler.frame_count
    worst = max(worst, *(error(memory) for memory in (memory_of(1, False), memory_of(1, True), None)))
    limit = torch._dynamo.config.recompile_limit
    print(
        f"{lengths} lengths, with a mask and without: {graphs} graphs; with one slot and with no memory "
        f"{compiler.frame_count} (the compiler's limit is {limit}); at most {worst:.1e} from the host as it is"
    )
    torch._dynamo.reset()
    return int(worst > 1e-6)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(*map(int, sys.argv[1:])))
