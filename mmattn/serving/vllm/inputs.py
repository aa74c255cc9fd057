"""Memories as multimodal input: vectors as they are, pictures through the encoder that the adapter was trained with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.multimodal.inputs import MultiModalFieldConfig
from vllm.multimodal.parse import ModalityDataItems, MultiModalDataItems, MultiModalDataParser
from vllm.multimodal.processing import (
    BaseDummyInputsBuilder,
    BaseProcessingInfo,
    EncDecMultiModalProcessor,
    PromptReplacement,
)

from mmattn.adapters.files import load_folder
from mmattn.adapters.gated import GatedAdapter
from mmattn.encoders.base import ImageEncoder, load_image_encoder
from mmattn.errors import ShapeError
from mmattn.memory import Memory
from mmattn.pipelines.build import check_encoder, saved_fingerprint
from mmattn.serving.vllm.engine import served_settings


class MemoryItems(ModalityDataItems[list[Tensor], Tensor]):
    """The memory (m, e) of a request."""

    def get_count(self) -> int:
        return len(self.data)

    def get(self, index: int) -> Tensor:
        return self.data[index]

    def get_processor_data(self) -> Mapping[str, object]:
        return {}

    def get_passthrough_data(self) -> Mapping[str, object]:
        return {"memory": self.data}


class MemoryParser(MultiModalDataParser):
    """Reads `multi_modal_data`: vectors (m, e) as "memory"; where the adapter has an encoder a picture, as "image"."""

    def __init__(self, info: MemoryInfo) -> None:
        super().__init__()
        self.info = info

    def parse_mm_data(self, mm_data: Mapping[str, Any]) -> MultiModalDataItems:
        name, items = self.info.modality, MultiModalDataItems()
        if set(mm_data) - {name}:
            raise ShapeError(f"this adapter reads a memory as {name!r}, got {sorted(mm_data)}")
        if name in mm_data:
            value = mm_data[name]
            tokens = [self.read(item) for item in (value if isinstance(value, list) else [value])]
            # No slots are no memory: all tokens pass through, and a null slot is not seen either.
            items[name] = MemoryItems(tokens if len(tokens) > 1 or len(tokens[0]) else [], name)
        return items

    def read(self, value: Any) -> Tensor:
        """Return the memory (m, e) of a picture or of vectors, checked."""
        value, adapter = getattr(value, "media", value), self.info.adapter
        if not isinstance(value, Tensor) and self.info.encoder is not None:
            return self.info.encoder([value]).tokens[0].float()
        tokens = torch.as_tensor(value).float()
        if tokens.dim() != 2 or tokens.shape[1] != adapter.memory_dim:
            raise ShapeError(f"a memory must be (m, {adapter.memory_dim}), got {tuple(tokens.shape)}")
        if adapter.resampler is None and len(tokens) > self.info.slots:
            most = self.info.slots
            raise ShapeError(f"a memory has at most {most} slots here, got {len(tokens)}: raise max_source_positions")
        return Memory(tokens[None]).tokens[0]  # refuses NaN and infinity


class MemoryInfo(BaseProcessingInfo):
    """Settings and encoder of the adapter."""

    @cached_property
    def adapter(self) -> GatedAdapter:
        """Settings of the adapter."""
        return served_settings(load_folder(self.get_hf_config().mmattn_adapter)[0])

    @cached_property
    def encoder(self) -> ImageEncoder | None:
        """The encoder of the pictures that the adapter was trained with."""
        config = self.get_hf_config()
        if config.mmattn_encoder is None:
            return None
        (name, pooled), folder = config.mmattn_encoder, Path(config.mmattn_adapter)
        encoder = load_image_encoder(name, "cpu", pooled=pooled)
        check_encoder(encoder, name, folder, saved_fingerprint(folder))
        return encoder

    @property
    def modality(self) -> str:
        """Name of the memory in `multi_modal_data`."""
        return "memory" if self.get_hf_config().mmattn_encoder is None else "image"

    @property
    def slots(self) -> int:
        """Most slots of a memory as the blocks attend to it, without a null slot."""
        return self.get_hf_config().max_source_positions - self.adapter.null_slot

    def rows(self, memory: Tensor) -> int:
        """Return the number of keys of a memory (m, e)."""
        resampler = self.adapter.resampler
        return (len(memory) if resampler is None else resampler.num_latents) + self.adapter.null_slot

    def get_data_parser(self) -> MultiModalDataParser:
        return MemoryParser(self)

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {self.modality: 1}

    @property
    def skip_prompt_length_check(self) -> bool:
        return True

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        return {self.modality: self.get_hf_config().max_source_positions}


class DummyMemory(BaseDummyInputsBuilder[MemoryInfo]):
    """The longest memory, by which vLLM measures what it needs."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return ""

    def get_dummy_mm_data(self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any) -> dict[str, Any]:
        memory = torch.zeros(self.info.slots, self.info.adapter.memory_dim)
        return {name: memory for name, count in mm_counts.items() if count}


class MemoryProcessor(EncDecMultiModalProcessor[MemoryInfo]):
    """Gives a request as many placeholders of an encoder as its memory has keys."""

    skip_decoder_start_token = True

    def create_encoder_prompt(self, prompt: list[int], mm_items: MultiModalDataItems) -> list[int]:
        return [0]

    def _get_mm_fields_config(self, hf_inputs: Any, hf_processor_mm_kwargs: Any) -> Mapping[str, MultiModalFieldConfig]:
        return {"memory": MultiModalFieldConfig.batched(self.info.modality)}

    def _get_prompt_updates(
        self, mm_items: MultiModalDataItems, hf_processor_mm_kwargs: Any, out_mm_kwargs: Any
    ) -> Sequence[PromptReplacement]:
        return [
            PromptReplacement(modality=name, target=[0], replacement=[0] * self.info.rows(items.get(0)))
            for name, items in mm_items.items()
            if items
        ]
