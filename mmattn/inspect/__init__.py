"""Inspection: attention weights, attribution, plots, the page of `mmattn explore`, the doctor.

Names are loaded when first used, so that the command line asks for the environment without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmattn.lazy import lazy_exports

if TYPE_CHECKING:
    from mmattn.inspect.attention import AdapterMetrics, attribute, media_names, record
    from mmattn.inspect.explorer import write_page
    from mmattn.inspect.plots import plot_curves, plot_heat_maps, plot_mask
    from mmattn.inspect.trace import Trace, load_traces, save_traces

__all__ = [
    "AdapterMetrics",
    "Trace",
    "attribute",
    "load_traces",
    "media_names",
    "plot_curves",
    "plot_heat_maps",
    "plot_mask",
    "record",
    "save_traces",
    "write_page",
]

__getattr__, __dir__ = lazy_exports(__name__)
