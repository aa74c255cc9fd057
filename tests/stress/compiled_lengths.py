"""Ask one compiled host with memories of many lengths, and see how often it is compiled again.

    python -m tests.stress.compiled_lengths [LENGTHS]

The host is one graph under the compiler's own limit of recompilations: a break or that limit is an error. Each length
comes with a mask and without one, in an order of its own. Prints one line and exits with 1 if an answer differs from
that of the host as it is, or if there are more graphs than two for each way of masking.
"""

from __future__ import annotations

import random
import sys

import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests import tiny

ROWS, MOST = 3, 4


@torch.no_grad()
def main(lengths: int = 50) -> int:
    torch._dynamo.reset()
    compiler = CompileCounterWithBackend("eager")
    model, ids = tiny.attach(tiny.make("llama", num_hidden_layers=1), layers=(0,)), tiny.text(ROWS)
    fast = torch.compile(model.host, backend=compiler, fullgraph=True)
    given = [(m, masked) for m in range(1, lengths + 1) for masked in (False, True)]
    random.Random(0).shuffle(given)
    worst = 0.0
    for m, masked in given:
        memory = tiny.memory(ROWS, m=m, lengths=[m, 0, (m + 1) // 2] if masked else None, seed=m)
        with model.condition(memory):
            got = fast(ids).logits
        want = model(ids, memory=memory).logits
        assert torch.isfinite(got).all() and torch.isfinite(want).all()
        worst = max(worst, float((got - want).abs().max() / want.abs().max()))
    torch._dynamo.reset()
    limit = torch._dynamo.config.recompile_limit
    print(
        f"{lengths} lengths, with a mask and without: {compiler.frame_count} graphs (the compiler's limit is {limit}), "
        f"at most {worst:.1e} from the host as it is"
    )
    return int(compiler.frame_count > MOST or worst > 1e-6)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(*map(int, sys.argv[1:])))
