"""Evaluation with the field's own tools: lm-evaluation-harness, ir_measures, sacrebleu, pycocoevalcap, torchmetrics.

`python -m mmattn.evaluation` is the command `lm_eval` with the model `mmattn`.
"""

from __future__ import annotations

from typing import Any

from mmattn.evaluation.scores import frechet_distance, retrieval_scores, text_scores

__all__ = ["AdaptedLM", "frechet_distance", "retrieval_scores", "text_scores"]


def __getattr__(name: str) -> Any:
    # On first use: its base class is one of lm_eval's.
    if name == "AdaptedLM":
        from mmattn.evaluation.harness import adapted_lm

        return adapted_lm()
    raise AttributeError(f"module 'mmattn.evaluation' has no attribute {name!r}")
