"""The table over several seeds: mean ± spread (half the distance from the lowest to the highest).

python -m recipes.compose.table recipes/compose/config.yaml [key=value …] --seeds 0 1 2
"""

from __future__ import annotations

from mmattn.recipes import over_seeds

from .tables import table
from .train import main as train

if __name__ == "__main__":
    over_seeds(__doc__ or "", train, table)
