"""The description of an adapter and its host in the files of an adapter, and the card."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mmattn import __version__
from mmattn.adapters.adapter_config import FORMAT, FORMAT_VERSION, adapter_settings
from mmattn.adapters.base import AdapterLayers
from mmattn.adapters.language_models import text_config
from mmattn.hosts.interop.peft import inner_host
from mmattn.hosts.interop.sharded import shards
from mmattn.hosts.ownership import AttachedModel
from mmattn.storage.fingerprints import fingerprint


def adapter_config(
    model: AttachedModel, name: str, encoder: str | None = None, *, with_fingerprint: bool = True
) -> dict[str, Any]:
    """Return the content of `adapter_config.json`."""
    adapter = model.adapter(name)
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "mmattn_version": __version__,
        "kind": adapter.config.kind,
        "package": type(adapter.config).__module__.partition(".")[0],
        "adapter": adapter_settings(adapter.config),
        "layers": list(adapter.layers),
        "host": describe_host(model, adapter.position, with_fingerprint),
        "encoder": encoder,
        "name": name,
    }


def host_sizes(model: AttachedModel, position: str) -> dict[str, int]:
    """Return the sizes of a host that an adapter at this position must fit."""
    sites = model.sites(position)
    return {"hidden_size": sites[0].width, "num_layers": len(sites)}


def describe_host(model: AttachedModel, position: str, with_fingerprint: bool = True) -> dict[str, Any]:
    """Describe the host for an adapter's file: class, family, sizes, fingerprint of the weights."""
    inner = inner_host(model.host)
    return {
        "kind": model.kind,
        "class": type(inner).__name__,
        "model_type": getattr(text_config(inner), "model_type", None),
        **host_sizes(model, position),
        "fingerprint": host_fingerprint(model) if with_fingerprint else None,
    }


def host_fingerprint(model: AttachedModel, dtype: torch.dtype | None = None) -> str | None:
    """Return the fingerprint of a host's weights, or None where some of them are elsewhere."""
    inner = inner_host(model.host)
    return None if weights_elsewhere(inner) else fingerprint(inner.state_dict(), dtype)


def weights_elsewhere(host: nn.Module) -> bool:
    """Return True if some weights are offloaded or in other processes, so that no fingerprint can be computed."""
    elsewhere = (
        parameter.device.type == "meta" or hasattr(parameter, "full_tensor") for parameter in host.parameters()
    )
    return bool(shards(host)) or any(elsewhere)


def card(config: dict[str, Any], adapter: AdapterLayers) -> str:
    """Return the README of an adapter's folder."""
    host = config["host"]
    count = sum(parameter.numel() for parameter in adapter.parameters())
    width, package = config["adapter"].get("memory_dim"), config["package"]
    memories = getattr(adapter.config, "reads", f"memories of width {width}")
    memories += f" from the encoder {config['encoder'][:24]}" if config["encoder"] else ""
    imports = "import mmattn" if package == "mmattn" else f"import mmattn\nimport {package}  # registers the adapter"
    return f"""---
library_name: mmattn
tags: [mmattn, cross-attention, adapter]
---

# A {config["kind"]} cross-attention adapter for {host["class"]}

{count:,} parameters at layers {config["layers"]} of a host with {host["num_layers"]} such layers, width
{host["hidden_size"]} (weights {(host["fingerprint"] or "unknown")[:12]}). It reads {memories}.

```python
{imports}

model = mmattn.load(host, "this folder")
{getattr(adapter.config, "example_call", "model(..., memory=memory)")}
```

Written by mmattn {config["mmattn_version"]}.
"""
