"""Run pytest many times in one environment, each time in a child of a process that has the heavy libraries imported.

It reads lines of JSON from standard input, {"cwd": folder, "arguments": [...], "seconds": limit}, and answers each with
one line, {"code": exit code or null after the limit, "out": what pytest printed}.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import tempfile
import traceback

HEAVY = ("pytest", "torch", "transformers", "tokenizers", "safetensors.torch", "accelerate", "pydantic")
OPTIONAL = ("diffusers", "peft", "datasets", "faiss", "qdrant_client", "torchvision", "open_clip", "PIL.Image")


def main() -> None:
    import importlib

    for name in HEAVY:
        importlib.import_module(name)
    for name in OPTIONAL:
        try:
            importlib.import_module(name)
        except ImportError:
            continue
    import transformers

    # Transformers imports its models when they are first asked for.
    for name in ("LlamaForCausalLM", "GPT2LMHeadModel", "PreTrainedTokenizerFast", "Trainer", "CLIPTextModel"):
        getattr(transformers, name)
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), flush=True)


def run(cwd: str, arguments: list[str], seconds: float) -> dict[str, object]:
    """One run of pytest in a child, whose whole group is killed at the limit."""
    with tempfile.TemporaryFile("w+") as out:
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
            os.chdir(cwd)
            sys.path.insert(0, cwd)
            import pytest

            code = 3
            try:
                code = int(pytest.main(arguments))
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        watched = os.pidfd_open(child)
        ended = bool(select.select([watched], [], [], seconds)[0])
        os.close(watched)
        with contextlib.suppress(ProcessLookupError):  # also what its tests started
            os.killpg(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        out.seek(0)
        return {"code": os.waitstatus_to_exitcode(status) if ended else None, "out": out.read()}


if __name__ == "__main__":
    main()
