"""What a tracker kept of a run, read back with its own reader."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def tensorboard(folder: Path) -> dict[str, Any]:
    """Settings, metrics by name and step, names of texts and of pictures, by TensorBoard's event accumulator."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    found: dict[str, Any] = {"settings": {}, "metrics": {}, "texts": {}, "pictures": {}}
    for place in sorted({path.parent for path in folder.rglob("events.out.*")}):
        events = EventAccumulator(str(place), size_guidance={"scalars": 0, "tensors": 0, "images": 0}).Reload()
        for name in events.Tags()["scalars"]:
            found["metrics"].setdefault(name, {}).update({one.step: one.value for one in events.Scalars(name)})
        for name in events.Tags()["tensors"]:
            found["texts"][name] = events.Tensors(name)[-1].tensor_proto.string_val[0].decode()
        for name in events.Tags()["images"]:
            one = events.Images(name)[-1]
            found["pictures"][name] = (one.width, one.height)
        for content in events.summary_metadata.values():
            if content.plugin_data.plugin_name == "hparams" and content.plugin_data.content:
                begun = HParamsPluginData.FromString(content.plugin_data.content).session_start_info.hparams
                found["settings"] |= {name: _hparam(value) for name, value in begun.items()}
    return found


def _hparam(value: Any) -> Any:
    kind = value.WhichOneof("kind")
    return None if kind is None else getattr(value, kind)


def weights_and_biases(folder: Path) -> dict[str, Any]:
    """The same of an offline run of Weights & Biases, and its id, from its log of records by its own protobufs."""
    import wandb

    wandb.teardown()  # as at the end of a process: the log is written by another one, which takes its time
    found: dict[str, Any] = {"settings": {}, "metrics": {}, "pictures": {}, "tables": {}, "ids": []}
    for path in sorted((folder / "wandb").glob("offline-run-*/run-*.wandb")):
        for record in _records(path):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                found["ids"].append(record.run.run_id)
            elif kind == "config":
                found["settings"] |= {item.key: json.loads(item.value_json) for item in record.config.update}
            elif kind == "history":
                line: dict[str, Any] = {}
                for item in record.history.item:
                    line["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
                _add_wandb(found, line, path.parent / "files")
    return found


def _add_wandb(found: dict[str, Any], line: dict[str, Any], files: Path) -> None:
    for name, value in line.items():
        prefix, _, rest = name.partition("/")
        if f"{prefix}/step" in line:
            found["metrics"].setdefault(name, {})[int(line[f"{prefix}/step"])] = value
        elif rest == "path" and prefix == "table":
            found["tables"][prefix] = json.loads((files / value).read_text())
        elif rest == "width" or rest == "height":
            found["pictures"].setdefault(prefix, {})[rest] = value


def _records(path: Path) -> Iterator[Any]:
    """Records of a file in the format of LevelDB's log, behind a head of seven bytes."""
    from wandb.proto import wandb_internal_pb2

    raw, at, whole = path.read_bytes(), 7, b""
    assert raw.startswith(b":W&B")
    while at + 7 <= len(raw):
        left = 32768 - at % 32768
        _, length, kind = struct.unpack("<IHB", raw[at : at + 7]) if left >= 7 else (0, 0, 0)
        if not kind:  # nothing more in this block
            at += left
            continue
        whole += raw[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield wandb_internal_pb2.Record.FromString(whole)
            whole = b""


def mlflow(address: str) -> dict[str, Any]:
    """The same of the runs of MLflow at an address, and their ids, by its client."""
    from mlflow import MlflowClient

    client = MlflowClient(address)
    (experiment,) = client.search_experiments(filter_string="name = 'mmattn'")
    runs = client.search_runs([experiment.experiment_id])
    metrics: dict[str, dict[int, float]] = {}
    for run in runs:
        for name in run.data.metrics:
            history = client.get_metric_history(run.info.run_id, name)
            metrics.setdefault(name, {}).update({one.step: one.value for one in history})
    return {
        "ids": [run.info.run_id for run in runs],
        "settings": {name: value for run in runs for name, value in run.data.params.items()},
        "metrics": metrics,
        "files": [file.path for run in runs for file in client.list_artifacts(run.info.run_id)],
        "names": [run.info.run_name for run in runs],
    }
