"""The command `lm_eval` with the model `mmattn`: `python -m mmattn.evaluation --model mmattn --tasks …`."""

from __future__ import annotations

from mmattn.errors import import_extra
from mmattn.evaluation.harness import adapted_lm

if __name__ == "__main__":
    adapted_lm()
    import_extra("lm_eval.__main__", "eval").cli_evaluate()
