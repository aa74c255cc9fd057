"""Pictures to captions: an encoder, a language model, and an adapter that attends to the patches."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch

from mmattn.encoders.images import as_list, load_image, picture_files
from mmattn.errors import ImageError
from mmattn.inspect.record_attention import record
from mmattn.inspect.trace import Trace
from mmattn.memory import Memory
from mmattn.pipelines.base import ImagePipeline
from mmattn.pipelines.generation import arguments, generate_texts, left_padded, prompt_rows, stream_text


class ImageToTextPipeline(ImagePipeline):
    """Captions of pictures."""

    def __call__(self, images: Any, *, batch_size: int = 64, progress: bool = False, **options: Any) -> Any:
        """A caption of a picture, or a list of them for a list of pictures.

        Args:
            images: one or a list: files, bytes, arrays, tensors, images of Pillow; or a folder of pictures, whose
                captions come in the order of their names.
            batch_size: pictures at once.
            progress: show a bar while pictures are encoded.
            **options: of `generate`, before those of the adapter's folder.

        Raises:
            ImageError: a picture that cannot be read.
        """
        folder = isinstance(images, (str, os.PathLike)) and os.path.isdir(images)
        pictures: list[Any] = picture_files([images]) if folder else as_list(images)
        one = not folder and len(pictures) == 1 and not isinstance(images, (list, tuple))
        memory = self._memory(pictures, progress)
        texts = generate_texts(
            self.model,
            self.tokenizer,
            [self.config.prompt] * memory.batch,
            memory,
            batch_size=batch_size,
            options=self.config.generation | options,
        )
        return texts[0] if one else texts

    def stream(self, image: Any, **options: Any) -> Iterator[str]:
        """The caption of a picture, piece by piece.

        Args:
            image: one picture.
            **options: as in a call.

        Raises:
            ImageError: it cannot be read.
        """
        prompt, memory = self.inputs(image)
        return stream_text(self.model, self.tokenizer, prompt, memory, options=self.config.generation | options)

    def inputs(self, image: Any) -> tuple[str, Memory]:
        """The prompt, and the memory (1, m, e) of a picture.

        Args:
            image: one picture.

        Raises:
            ImageError: it cannot be read.
        """
        return self.config.prompt, self._memory([image], False)

    @torch.no_grad()
    def trace(self, image: Any) -> Trace:
        """The caption of a picture, as the title, and which patches each of its words attended to.

        Beside it stands the picture as the encoder saw it, on which the patches lie.

        Args:
            image: one picture.

        Raises:
            ImageError: it cannot be read.
        """
        if image is None:
            raise ImageError("there is no picture to caption: give one")
        memory = self._memory([image], False)
        ids, mask = left_padded(self.tokenizer, prompt_rows(self.tokenizer, [self.config.prompt]), memory.device)
        given = arguments(self.model, self.tokenizer, ids, mask, self.config.generation)
        made = self.model.generate(**given, memory=memory)
        if made[0, -1] == given["eos_token_id"]:
            made = made[:, :-1]
        with record(self.model) as weights:
            self.model(input_ids=made, memory=memory)
        rows, columns = self.encoder.grid
        new = made[0, ids.shape[1] :].tolist()
        text = self.tokenizer.decode(new, skip_special_tokens=True).strip()
        # What a token attended to is seen where it was predicted: at the one before.
        first = ids.shape[1] - 1
        return Trace(
            [self.tokenizer.decode([one]) for one in new],
            [f"row {row + 1}, column {column + 1}" for row in range(rows) for column in range(columns)],
            torch.stack([calls[0][0, :, first:-1] for _, calls in sorted(weights.items())]).cpu(),
            [f"layer {layer}" for _, layer in sorted(weights)],
            text,
            grid=self.encoder.grid,
            picture=self._seen(image),
        )

    def _memory(self, images: list[Any], progress: bool) -> Memory:
        memory: Memory = self.encoder(images, progress=progress)
        return memory.to(torch.float32)

    def _seen(self, image: Any) -> Any:
        """A picture as the encoder sees it: small, and of a long one the middle."""
        prepared = self.encoder.image_processor
        (pixels,) = prepared([image])
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (prepared.mean, prepared.std))
        return load_image((255 * (pixels * std + mean)).round().clamp(0, 255).byte())
