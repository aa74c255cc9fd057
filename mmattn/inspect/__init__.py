"""Inspection: attention weights, attribution, figures of heads, plots, the page of `mmattn explore`, the doctor.

Names are loaded when first used, so that the command line asks for the environment without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "AdapterMetrics": "attention_figures",
    "HeadFigures": "attention_figures",
    "Trace": "trace",
    "attribute": "attribution",
    "doctor": "diagnosis",
    "head_figures": "attention_figures",
    "load_traces": "trace",
    "media_names": "media",
    "over_frames": "media",
    "over_series": "media",
    "over_sound": "media",
    "plot_curves": "plots",
    "plot_heat_maps": "plots",
    "plot_map": "plots",
    "plot_mask": "plots",
    "plot_positions": "plots",
    "plot_surface": "plots",
    "record": "record_attention",
    "roll_out": "attribution",
    "save_traces": "trace",
    "write_page": "explorer",
}

__all__ = [*_HOME]

if TYPE_CHECKING:
    from mmattn.inspect.attention_figures import AdapterMetrics, HeadFigures, head_figures
    from mmattn.inspect.attribution import attribute, roll_out
    from mmattn.inspect.diagnosis import doctor
    from mmattn.inspect.explorer import write_page
    from mmattn.inspect.media import media_names, over_frames, over_series, over_sound
    from mmattn.inspect.plots import plot_curves, plot_heat_maps, plot_map, plot_mask, plot_positions, plot_surface
    from mmattn.inspect.record_attention import record
    from mmattn.inspect.trace import Trace, load_traces, save_traces


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'mmattn.inspect' has no attribute {name!r}")
    return getattr(importlib.import_module(f"mmattn.inspect.{_HOME[name]}"), name)
