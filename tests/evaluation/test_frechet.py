"""The Fréchet distance of features, beside its formula."""

from __future__ import annotations

import pytest
import torch

from mmattn.errors import NonFiniteError, ShapeError
from mmattn.evaluation import frechet_distance


def features(rows: int, width: int, seed: int) -> torch.Tensor:
    mixed = torch.randn(width, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64) @ mixed


@pytest.mark.parametrize("width", [1, 2, 13])
def test_the_formula(width: int) -> None:
    """‖μ₁ − μ₂‖² + tr(C₁ + C₂ − 2 (C₁C₂)^½), the root through that of C₁, which is symmetric."""
    real, made = features(101, width, 0), features(53, width, 5) + 0.7
    own, other = torch.cov(real.T).reshape(width, width), torch.cov(made.T).reshape(width, width)
    values, vectors = torch.linalg.eigh(own)
    root = vectors @ torch.diag(values.clamp(min=0).sqrt()) @ vectors.T
    crossed = torch.linalg.eigvalsh(root @ other @ root).clamp(min=0).sqrt().sum()
    wanted = (real.mean(0) - made.mean(0)).square().sum() + own.trace() + other.trace() - 2 * crossed
    assert frechet_distance(real, made) == pytest.approx(float(wanted), rel=1e-8)


def test_it_is_the_same_both_ways_and_nothing_to_itself() -> None:
    real, made = features(29, 3, 0).float(), features(31, 3, 7).float()
    assert frechet_distance(real, made) == pytest.approx(frechet_distance(made, real), rel=1e-9)
    assert abs(frechet_distance(real, real)) < 1e-9 < frechet_distance(real, made)


def test_what_has_no_distance() -> None:
    for real, made in ((torch.zeros(5, 3), torch.zeros(5, 4)), (torch.zeros(1, 3), torch.zeros(5, 3))):
        with pytest.raises(ShapeError, match="of at least two images, of one width"):
            frechet_distance(real, made)
    with pytest.raises(ShapeError, match=r"got generated \(5, 3, 2\)"):
        frechet_distance(torch.zeros(5, 3), torch.zeros(5, 3, 2))
    with pytest.raises(NonFiniteError, match="features of generated images have NaN"):
        frechet_distance(torch.zeros(5, 3), torch.full((5, 3), float("nan")))
