"""The command `lm_eval` with the model `mmattn`: `python -m mmattn.evaluation --model mmattn --tasks …`."""

from __future__ import annotations

from mmattn.errors import import_extra

if __name__ == "__main__":
    import_extra("mmattn.evaluation.harness", "eval")  # registers the model
    import_extra("lm_eval.__main__", "eval").cli_evaluate()
