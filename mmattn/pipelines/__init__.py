"""Pipelines: an adapter with everything it needs, found from its own folder.

`mmattn.pipeline(folder)` gives an `ImageToTextPipeline`, a `QuestionAnsweringPipeline`, a `PassageAnsweringPipeline`, a
`TextToImagePipeline` or a `MemoryToTextPipeline`; `PipelineConfig(...).save(folder)` writes what it reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmattn.lazy import lazy_exports

if TYPE_CHECKING:
    from mmattn.encoders.images import load_image_encoder
    from mmattn.pipelines.base import pipeline
    from mmattn.pipelines.build import load_host, load_language_model
    from mmattn.pipelines.config import EncoderReference, MemoryConfig, ModelReference, PipelineConfig
    from mmattn.pipelines.generation import generate_texts
    from mmattn.pipelines.passage_answering import PassageAnsweringPipeline
    from mmattn.pipelines.question_answering import (
        Answer,
        QuestionAnsweringPipeline,
        Source,
        build_index,
        load_text_encoder,
        read_entries,
    )
    from mmattn.pipelines.text_to_image import (
        DiffusionHost,
        PromptEncoder,
        TextToImagePipeline,
        as_image,
        load_diffusion_host,
        noise_schedule,
    )
    from mmattn.pipelines.to_text import ImageToTextPipeline, MemoryToTextPipeline

__all__ = [
    "Answer",
    "DiffusionHost",
    "EncoderReference",
    "ImageToTextPipeline",
    "MemoryConfig",
    "MemoryToTextPipeline",
    "ModelReference",
    "PassageAnsweringPipeline",
    "PipelineConfig",
    "PromptEncoder",
    "QuestionAnsweringPipeline",
    "Source",
    "TextToImagePipeline",
    "as_image",
    "build_index",
    "generate_texts",
    "load_diffusion_host",
    "load_host",
    "load_image_encoder",
    "load_language_model",
    "load_text_encoder",
    "noise_schedule",
    "pipeline",
    "read_entries",
]

__getattr__, __dir__ = lazy_exports(__name__)
