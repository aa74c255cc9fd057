"""The Fréchet distance between two sets of images, by torchmetrics, in the features of any encoder."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mmattn.errors import NonFiniteError, ShapeError, import_extra


def frechet_distance(real: Tensor, generated: Tensor) -> float:
    """Return the Fréchet distance between two sets of features, as normal distributions (arXiv 1706.08500, equation 6).

    It is the FID of papers only with the features of the Inception network and as many images; other features, such as
    `encoder(images).tokens.mean(1)`, have another scale.

    Args:
        real: (n, d), features of real images.
        generated: (m, d), features of generated images.

    Raises:
        ShapeError: not (n, d), two widths d, or fewer than two of each.
        NonFiniteError: NaN or infinity.
        MissingExtraError: torchmetrics is not installed.

    >>> features = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    >>> round(frechet_distance(features, features + 2), 3)
    12.0
    """
    for name, features in (("real", real), ("generated", generated)):
        if features.dim() != 2 or len(features) < 2 or features.shape[1] != real.shape[-1]:
            raise ShapeError(
                f"features must be (n, d) of at least two images, of one width; got {name} {tuple(features.shape)} "
                f"beside {tuple(real.shape)}"
            )
        if not torch.isfinite(features).all():
            raise NonFiniteError(f"features of {name} images have NaN or infinity")
    library = import_extra("torchmetrics.image.fid", "metrics")
    distance = library.FrechetInceptionDistance(feature=_Features(real.shape[1]), normalize=True)
    distance.set_dtype(torch.float64)
    distance.update(real.double().cpu(), real=True)
    distance.update(generated.double().cpu(), real=False)
    return float(distance.compute())


class _Features(nn.Module):
    """Identity: torchmetrics passes features through the network that it expects."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_features = width

    def forward(self, features: Tensor) -> Tensor:
        return features
