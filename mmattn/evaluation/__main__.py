"""The command `lm_eval` with the model `mmattn`: `python -m mmattn.evaluation --model mmattn --tasks …`."""

from __future__ import annotations

from mmattn.errors import import_extra
from mmattn.evaluation.harness import adapted_lm


def main() -> None:
    """Run the command line of lm_eval, which knows the model "mmattn" here."""
    adapted_lm()
    import_extra("lm_eval.__main__", "eval").cli_evaluate()


if __name__ == "__main__":
    main()
