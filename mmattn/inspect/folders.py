"""Is this adapter's folder whole, does what it holds look alive, and is it well on its host?"""

from __future__ import annotations

import os
import warnings
from os import PathLike

from mmattn.adapters.folder import load_folder
from mmattn.errors import AdapterFileError, NonFiniteError
from mmattn.hosts import host_kinds, load
from mmattn.inspect.batches import random_batch
from mmattn.inspect.doctor import doctor, openings
from mmattn.inspect.report import Report


def diagnose(folder: str | PathLike[str], host: str | PathLike[str] | None = None) -> Report:
    """Examine the folder of a saved adapter.

    Whole files that agree, finite weights, and gates that have moved from 0, where they start: an adapter with closed
    gates adds nothing. With a host, also all that `mmattn.doctor` asks, of a random batch.

    Args:
        host: name or folder of what the adapter was trained on, to be loaded.

    Raises:
        AdapterFileError: the host cannot be loaded, or the adapter is of another one.
    """
    report = Report()
    try:
        config, tensors = load_folder(folder)
    except (AdapterFileError, NonFiniteError) as error:
        report.add(False, "files", str(error))
        return report
    made_for = config["host"]
    count = sum(tensor.numel() for tensor in tensors.values())
    report.add(True, "files", f"whole, checksums agree, written by mmattn {config['mmattn_version']}")
    report.add(True, "kind", f"{config['kind']}, {count:,} parameters, at layers {config['layers']}")
    report.add(True, "host", f"{made_for['class']} of {made_for['num_layers']} layers, width {made_for['hidden_size']}")
    report.add(True, "memory", f"width {config['adapter']['memory_dim']}")
    if host is None:
        ok, answer = openings(tensors)
        report.add(ok, "gates", answer)
        return report
    kind = host_kinds().get(made_for["kind"])
    if kind is None:
        raise AdapterFileError(
            f"this adapter is for a host of kind {made_for['kind']!r}, and registered are {', '.join(host_kinds())}: "
            "import the package that registers it first"
        )
    loaded = kind.load_host(host)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = load(loaded, folder)
    other = [str(one.message) for one in caught if "the weights of this" in str(one.message)]
    report.add(not other, "weights of the host", other[0] if other else f"those it was trained on, {os.fspath(host)}")
    report.lines += doctor(model, random_batch(model)).lines
    return report
