"""What encoders share: frozen weights, the fingerprint; for pictures, intake in batches and the way into a Memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mmattn.encoders.images import MAX_PIXELS, Preparation, pictures
from mmattn.errors import check_int
from mmattn.memory import Memory
from mmattn.progress import batches


class FrozenEncoder(nn.Module):
    """A network that is in evaluation mode for good, learns nothing, and is known by its fingerprint.

    Attributes:
        model: the network.
        settings: what it was made with, as JSON holds it.
        dim: width e of the slots it makes.
    """

    dim: int

    def __init__(
        self,
        model: nn.Module,
        settings: Mapping[str, Any] | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        super().__init__()
        self.model = model.requires_grad_(False).to(device or "cpu")
        self.settings = dict(settings or {})
        self._hashed: tuple[Any, str] | None = None
        self.eval()

    def train(self, mode: bool = True) -> FrozenEncoder:
        """Stays in evaluation mode, also as part of a model that trains."""
        super().train(False)
        return self

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the network."""
        return next(self.parameters()).dtype

    @property
    def fingerprint(self) -> str:
        """sha256 of the settings and weights that shape the memory: equal for equal encoders, on any machine."""
        weights = {name: tensor for name, tensor in self._weights().items() if isinstance(tensor, Tensor)}
        # Each write into a tensor counts its version up, so that weights edited in place are hashed anew.
        state = [(name, tensor._version, tensor.dtype, tensor.device) for name, tensor in weights.items()]
        if self._hashed is None or self._hashed[0] != state:
            digest = hashlib.sha256(json.dumps(self._described(), sort_keys=True).encode())
            for name in sorted(weights):
                tensor = weights[name].detach().cpu().contiguous()
                digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
                digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
            self._hashed = (state, digest.hexdigest())
        return self._hashed[1]

    def _described(self) -> dict[str, Any]:
        return self.settings

    def _weights(self) -> dict[str, Tensor]:
        return self.model.state_dict()


class PictureEncoder(FrozenEncoder):
    """A frozen network that turns pictures into memory: one row per picture, one slot per patch, or one if pooled.

    A network of your own becomes an encoder by a subclass that says in `features` what it computes. The network is in
    evaluation mode for good and learns nothing; `encoder(images).save(path)` keeps what it saw, and `Memory.load(path)`
    brings it back without the network.

    Attributes:
        dim: width e of the slots.
        grid: (height, width) of the patches, or None where they have no such order.
        preparation: how pictures become pixels.
    """

    grid: tuple[int, int] | None

    def __init__(
        self,
        model: nn.Module,
        preparation: Preparation,
        *,
        pooled: bool = False,
        settings: Mapping[str, Any] | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        super().__init__(model, settings, device)
        self.preparation = preparation
        self.pooled = pooled
        with torch.no_grad():
            slots, self.grid = self._slots(preparation([torch.zeros(3, 1, 1)]))
        self.length, self.dim = slots.shape[1:]

    def features(self, pixels: Tensor) -> Tensor:
        """Features (b, e, height, width), (b, m, e), or (b, e) if pooled, of pixels (b, 3, height, width)."""
        features: Tensor = self.model(pixels)
        return features

    def forward(
        self, images: Any, *, batch_size: int = 32, progress: bool = False, max_pixels: int = MAX_PIXELS
    ) -> Memory:
        """The memory of one picture or a list of them (all that `images.load_image` reads).

        `sources` names the picture and the patch of each slot: {"image": 0, "patch": [row, column]}.

        Raises:
            ImageError: naming the picture that cannot be read.
        """
        check_int("batch_size", batch_size)
        todo = pictures(images)
        # no_grad and not inference_mode: an adapter's backward may keep these tensors.
        with torch.no_grad():
            parts = [
                self._slots(self.preparation(todo[start : start + batch_size], first=start, max_pixels=max_pixels))[0]
                for start in batches(len(todo), batch_size, "encoding", progress)
            ]
        tokens = torch.cat(parts) if parts else torch.zeros(0, self.length, self.dim, dtype=self.dtype)
        return Memory(tokens.to(self.device), sources=[self._origin(image) for image in range(len(todo))])

    def _described(self) -> dict[str, Any]:
        return {**self.settings, "preparation": self.preparation.as_dict(), "pooled": self.pooled}

    def _slots(self, pixels: Tensor) -> tuple[Tensor, tuple[int, int] | None]:
        features = self.features(pixels.to(self.device, self.dtype))
        grid: tuple[int, int] | None
        if features.dim() == 4:
            grid = (features.shape[2], features.shape[3])
            slots = features.flatten(2).transpose(1, 2)
        else:
            slots = features[:, None] if features.dim() == 2 else features
            side = round(slots.shape[1] ** 0.5)
            grid = (side, side) if side * side == slots.shape[1] else None
        if self.pooled:
            return slots.mean(1, keepdim=True), (1, 1)
        return slots.contiguous(), grid

    def _origin(self, image: int) -> list[dict[str, Any]]:
        if self.pooled:
            return [{"image": image}]
        if self.grid is None:
            return [{"image": image, "slot": slot} for slot in range(self.length)]
        return [{"image": image, "patch": list(divmod(slot, self.grid[1]))} for slot in range(self.length)]

    def extra_repr(self) -> str:
        return f"dim={self.dim}, grid={self.grid}, pooled={self.pooled}"
