"""Arguments of vLLM's engine for the folder of an adapter, its chat template, and the order of memories in a batch."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, cast

from vllm.engine.arg_utils import EngineArgs
from vllm.renderers import hf
from vllm.transformers_utils.config import get_config
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from mmattn.adapters.base import adapter_kinds
from mmattn.adapters.files import CONFIG, Config, load_folder, parse_config
from mmattn.adapters.gated import GatedAdapter
from mmattn.errors import AdapterFileError, AttachError
from mmattn.models.cache import resolve as resolve_model
from mmattn.models.catalogue import find_asset
from mmattn.pipelines.build import resolve
from mmattn.pipelines.config import FILE, PipelineConfig

ARCHITECTURE = "MmattnAdaptedForCausalLM"
MAX_SLOTS = 1024  # of a memory, where no resampler says how many

#: Settings of a gated adapter that vLLM's attention does not support, and their defaults.
_REFUSED = {"score_bias": False, "length_norm": None, "visible_segments": "all", "where": None}


def patch_engine() -> None:
    """Let engines take the folder of an adapter as their model, with its prompt, and encode memories in batch order."""
    if hasattr(EngineArgs.create_model_config, "__wrapped__"):
        return
    create, batch = EngineArgs.create_model_config, GPUModelRunner._batch_mm_inputs_from_scheduler
    run = GPUModelRunner._model_forward
    resolve_template = hf.resolve_chat_template

    @functools.wraps(create)
    def create_model_config(self: EngineArgs) -> Any:
        folder = Path(find_asset(self.model))
        if (folder / CONFIG).is_file():
            serve_adapter(self, folder.resolve())
        elif isinstance(self.hf_overrides, dict) and "mmattn_adapter" in self.hf_overrides:
            self.model = str(resolve_model(self.model))
            added = host_overrides(self.model, Path(self.hf_overrides["mmattn_adapter"]).resolve())
            self.hf_overrides = added | self.hf_overrides
        return create(self)

    @functools.wraps(batch)
    def in_batch_order(self: GPUModelRunner, scheduler_output: Any) -> Any:
        # Keys and values go to slots in the order of the batch, and the scheduler's is another.
        hashes, inputs, references = batch(self, scheduler_output)
        if self.model_config.architecture == ARCHITECTURE:
            places = [self.input_batch.req_id_to_index[request] for request, _ in references]
            order = sorted(range(len(places)), key=places.__getitem__)
            hashes, inputs, references = ([part[place] for place in order] for part in (hashes, inputs, references))
        return hashes, inputs, references

    @functools.wraps(run)
    def with_prompt_lengths(self: GPUModelRunner, *args: Any, **kwargs: Any) -> Any:
        if self.model_config.architecture == ARCHITECTURE:
            kwargs["prompt_lengths"] = self.input_batch.num_prompt_tokens_cpu_tensor
        return run(self, *args, **kwargs)

    @functools.wraps(resolve_template)
    def resolve_chat_template(
        tokenizer: Any, chat_template: str | None, *args: Any, model_config: Any, **more: Any
    ) -> Any:
        template = resolve_template(tokenizer, chat_template, *args, model_config=model_config, **more)
        prompt = getattr(model_config.hf_config, "mmattn_prompt", None)
        return template if prompt is None or chat_template is not None else prompt_template(prompt, template)

    hf.resolve_chat_template = resolve_chat_template
    EngineArgs.create_model_config = create_model_config
    GPUModelRunner._model_forward = with_prompt_lengths
    GPUModelRunner._batch_mm_inputs_from_scheduler = in_batch_order


def serve_adapter(args: EngineArgs, folder: Path) -> None:
    """Turn the model of an engine from the folder of an adapter into its host, with overrides."""
    if not (folder / FILE).is_file():
        raise AdapterFileError(
            f"{str(folder)!r} has no {FILE}, so its host is unknown: serve the host with "
            f'--hf-overrides \'{{"mmattn_adapter": "{folder}"}}\''
        )
    config = PipelineConfig.load(folder)
    if config.host.lora is not None or config.host.quantization is not None:
        raise AttachError(
            f"the host of {str(folder)!r} has a LoRA or is quantised, which the plug-in does not do: use mmattn serve"
        )
    host = str(resolve_model(resolve(config.host.name, folder)))
    args.served_model_name = args.served_model_name or args.model
    args.hf_overrides = host_overrides(host, folder, config) | dict(args.hf_overrides)
    args.model, args.tokenizer, args.revision = host, args.tokenizer or host, args.revision or config.host.revision


def host_overrides(host: str, folder: Path, pipeline: PipelineConfig | None = None) -> dict[str, Any]:
    """Return the overrides that turn the config of a host into that of an adapted model."""
    settings = served_settings(load_folder(folder)[0])
    encoder = None if pipeline is None or pipeline.task != "image-to-text" else pipeline.encoder
    slots = MAX_SLOTS if settings.resampler is None else settings.resampler.num_latents
    visible_from = PipelineConfig.load(folder).visible_from if (folder / FILE).is_file() else "first_token"
    return {
        "architectures": [ARCHITECTURE],
        "mmattn_host": get_config(host, trust_remote_code=False).architectures,
        "mmattn_adapter": str(folder),
        "mmattn_visible_from": visible_from,
        "mmattn_encoder": None if encoder is None else [resolve(encoder.name, folder), encoder.pooled],
        "mmattn_prompt": None if pipeline is None else [pipeline.prompt, encoder is not None],
        "is_encoder_decoder": True,
        "max_source_positions": slots + settings.null_slot,
    }


def prompt_template(prompt: tuple[str, bool], host: str | None) -> str:
    """Return a chat template with the prompt of a pipeline for one message of a user, and the host's for others.

    Where an adapter of pictures has a prompt without "{question}", no message is read.
    """
    text, reads_pictures = prompt
    before, place, after = text.partition("{question}")
    start, end = json.dumps(before, ensure_ascii=False), json.dumps(after, ensure_ascii=False)
    if not place:
        start = f"(bos_token or eos_token) ~ {start}"
        if reads_pictures:
            return f"{{{{ {start} }}}}"
    parts = "messages[0].content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join('\\n')"
    text = f"(messages[0].content if messages[0].content is string else {parts}){' | trim' if place else ''}"
    others = host or "{{ raise_exception('the host has no chat template: give one message of a user') }}"
    one = "messages | length == 1 and messages[0].role == 'user'"
    return f"{{% if {one} %}}{{{{ {start} ~ {text} ~ {end} }}}}{{% else %}}{others}{{% endif %}}"


def served_settings(saved: Config) -> GatedAdapter:
    """Return the settings of a saved adapter that vLLM can run; AttachError of others."""
    if saved["kind"] != GatedAdapter.kind:
        raise AttachError(f"vLLM serves gated adapters, and this one is {saved['kind']!r}: use model.generate")
    settings = cast(GatedAdapter, parse_config(saved, adapter_kinds()))
    unsupported = [name for name, value in _REFUSED.items() if getattr(settings, name) != value]
    unsupported += ["feed_forward_all"] if settings.layout.feed_forward_all else []
    unsupported += ["a block before layer 0"] if settings.position == "before" and saved["layers"][0] == 0 else []
    if unsupported:
        raise AttachError(
            f"the vLLM plug-in does not support {', '.join(unsupported)} of this adapter: use model.generate"
        )
    return settings
