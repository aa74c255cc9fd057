"""Texts of a language model about images that an encoder reads, or about a memory that comes with each call."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmattn.encoders.images import ImageProcessor, image_list, load_image, picture_files
from mmattn.errors import ImageError, ShapeError, TextError
from mmattn.memory import Memory
from mmattn.pipelines.base import ImagePipeline, Pipeline
from mmattn.pipelines.generation import Prompt, end_ids, generate_arguments
from mmattn.tokenization import check_text

if TYPE_CHECKING:
    from PIL.Image import Image

    from mmattn.inspect.trace import Trace


class ImageToTextPipeline(ImagePipeline):
    """Captions of images, or answers to questions about them."""

    def __call__(
        self,
        images: object,
        text: str | Sequence[str] = "",
        *,
        batch_size: int = 64,
        progress: bool = False,
        **options: object,
    ) -> str | list[str]:
        """Return the text that the model generates for an image, or a list of texts for a list of images.

        Args:
            images: one or a list: files, bytes, arrays, tensors, images of Pillow; or a folder of images, whose
                captions come in the order of their names.
            text: a question about each image; for an adapter that only captions, the start of the caption. A list has
                one for each image.
            batch_size: images at once.
            progress: show a bar while images are encoded.
            **options: of `generate`; they override those of the adapter's folder.

        Raises:
            ImageError: an image cannot be read.
            TextError: the adapter answers questions, and none was asked; it only captions, and adds nothing to the
                text; or the texts are not as many as the images.
        """
        if isinstance(images, (str, os.PathLike)) and os.path.isdir(images):
            images = picture_files([images])
        pictures = image_list(images)
        one = len(pictures) == 1 and not isinstance(images, (list, tuple))
        questions = [text] * len(pictures) if isinstance(text, str) else check_text(text)
        if len(questions) != len(pictures):
            raise TextError(f"{len(pictures)} images have {len(questions)} texts: give one for each, or one for all")
        prompts = [self.make_prompt(question) for question in questions]
        memory = self.make_memory(pictures, progress)
        texts = self._generate(prompts, memory, batch_size, options)
        for question, answer in zip(questions, texts, strict=True):
            self._check_caption(question, answer)
        return texts[0] if one else texts

    def stream(self, image: object, text: str = "", **options: object) -> Iterator[str]:
        """Yield the text for an image piece by piece. Arguments and errors as for a call."""
        pieces = self._stream(*self.inputs(image, text), options)

        def checked() -> Iterator[str]:
            caption = ""
            with closing(pieces):
                for piece in pieces:
                    caption += piece
                    yield piece
            self._check_caption(text, caption)

        return checked()

    def _check_caption(self, start: str, rest: str) -> None:
        """Raise TextError where an adapter that only captions adds nothing to a text."""
        if start.strip() and not rest.strip() and "{question}" not in self.config.prompt:
            raise TextError(
                f"the adapter adds nothing to {start!r}: it captions pictures and follows no instructions. Leave the "
                "text out, or give the start of a caption"
            )

    def inputs(self, image: object, text: str = "") -> tuple[Prompt, Memory]:
        """Return the prompt, and the memory (1, m, e) of an image."""
        return self.make_prompt(text), self.make_memory([image])

    @torch.no_grad()
    def trace(self, image: object, text: str = "") -> Trace:
        """Return the text for an image, as the title, and the patches that each of its words attended to.

        The trace has the image as the encoder reads it, on which the patches lie.
        """
        from mmattn.inspect.attention import record
        from mmattn.inspect.trace import Trace

        if image is None:
            raise ImageError("there is no picture to caption: give one")
        prompt, memory = self.inputs(image, text)
        how: Any = {"visible_from": self.config.visible_from, "options": self.config.generation}
        given = generate_arguments(self.model, self.tokenizer, [prompt], memory, **how)
        out = self.model.generate(**given)
        if int(out[0, -1]) in end_ids(self.model, self.tokenizer):
            out = out[:, :-1]
        with record(self.model) as weights:
            self.model(input_ids=out, **{name: given[name] for name in ("memory", "arrived") if name in given})
        rows, columns = self.encoder.grid or (1, self.encoder.length)
        # The weights of a token are those at the position that predicted it: the one before.
        first = given["input_ids"].shape[1] - 1
        new = out[0, first + 1 :].tolist()
        return Trace(
            [self.tokenizer.decode([token]) for token in new],
            [f"row {row + 1}, column {column + 1}" for row in range(rows) for column in range(columns)],
            torch.stack([calls[0][0, :, first:-1] for _, calls in sorted(weights.items())]).cpu(),
            [f"layer {layer}" for _, layer in sorted(weights)],
            self.tokenizer.decode(new, skip_special_tokens=True).strip(),
            grid=self.encoder.grid,
            picture=self._preprocessed(image),
        )

    def make_memory(self, images: list[object], progress: bool = False) -> Memory:
        """Return the memory (b, m, e) of images."""
        return self.encoder(images, progress=progress).to(torch.float32)

    def _preprocessed(self, image: object) -> Image | None:
        """Return an image as the encoder reads it: small, and of a long one the middle; None for other processors."""
        processor = self.encoder.image_processor
        if not isinstance(processor, ImageProcessor):
            return None
        (pixels,) = processor([image])
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (processor.mean, processor.std))
        return load_image((255 * (pixels * std + mean)).round().clamp(0, 255).byte())


class MemoryToTextPipeline(Pipeline):
    """Texts about vectors that the caller has encoded."""

    def __call__(
        self,
        text: str | Sequence[str],
        memory: Memory | Tensor | None = None,
        *,
        batch_size: int = 64,
        **options: object,
    ) -> str | list[str]:
        """Return the text that the model generates after a text, or a list of texts for a list.

        Args:
            text: one or a list; a question, or the start of the answer.
            memory: (b, m, e), a row for each text; None for the bare host.
            batch_size: texts at once.
            **options: of `generate`; they override those of the adapter's folder.

        Raises:
            TextError: the prompt has a place for a question, and the text is empty.
            ShapeError: a memory of another width, or of another number of rows.
        """
        texts = check_text(text)
        prompts = list(map(self.make_prompt, texts))
        rows = self._generate(prompts, self._rows(memory, len(texts)), batch_size, options)
        return rows[0] if isinstance(text, str) else rows

    def stream(self, text: str, memory: Memory | Tensor | None = None, **options: object) -> Iterator[str]:
        """Yield the text after a text piece by piece. Arguments and errors as for a call."""
        return self._stream(self.make_prompt(text), self._rows(memory, 1), options)

    def _rows(self, memory: Memory | Tensor | None, texts: int) -> Memory | None:
        if memory is None:
            return None
        memory = Memory(memory) if isinstance(memory, Tensor) else memory
        if len(memory) != texts:
            raise ShapeError(f"{texts} texts have a memory of {len(memory)} rows: give a row for each")
        return memory.to(self.device)
