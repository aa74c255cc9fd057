"""The Fréchet distance between two sets of pictures, by torchmetrics, in the features of any encoder."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mmattn.errors import NonFiniteError, ShapeError, import_extra


def frechet_distance(real: Tensor, made: Tensor) -> float:
    """The Fréchet distance between two sets of features, as normal distributions (arXiv 1706.08500, equation 6).

    It is the "FID" of a paper only with the features of its Inception network and as many pictures; in other features
    it has another scale, and compares what they see: `encoder(pictures).tokens.mean(1)`, say.

    Args:
        real: (n, d), the features of real pictures.
        made: (m, d), those of pictures that were made.

    Raises:
        ShapeError: not (n, d), two widths d, or fewer than two of each.
        NonFiniteError: NaN or infinity.
        MissingExtraError: torchmetrics is not installed.

    >>> features = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    >>> round(frechet_distance(features, features + 2), 3)
    12.0
    """
    for name, given in (("real", real), ("made", made)):
        if given.dim() != 2 or len(given) < 2 or given.shape[1] != real.shape[-1]:
            raise ShapeError(
                f"features must be (n, d) of at least two pictures, of one width; got {name} {tuple(given.shape)} "
                f"beside {tuple(real.shape)}"
            )
        if not torch.isfinite(given).all():
            raise NonFiniteError(f"features of {name} pictures have NaN or infinity")
    library = import_extra("torchmetrics.image.fid", "metrics")
    distance = library.FrechetInceptionDistance(feature=_Features(real.shape[1]), normalize=True)
    distance.set_dtype(torch.float64)
    distance.update(real.double().cpu(), real=True)
    distance.update(made.double().cpu(), real=False)
    return float(distance.compute())


class _Features(nn.Module):
    """What torchmetrics asks for features, of pictures that are features already."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_features = width

    def forward(self, features: Tensor) -> Tensor:
        return features
