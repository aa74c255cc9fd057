"""What several commands check of their arguments before anything heavy is imported."""

from __future__ import annotations

from pathlib import Path


def check_adapter_folder(folder: Path) -> None:
    """Refuse a folder that cannot hold an adapter before anything heavy is imported.

    Args:
        folder: as given on the command line.

    Raises:
        AdapterFileError: no such folder, or one without adapter_config.json.
    """
    from mmattn.errors import AdapterFileError

    if not folder.is_dir():
        raise AdapterFileError(f"there is no adapter folder {folder}; `mmattn ls` lists those under runs")
    if not (folder / "adapter_config.json").is_file():
        found = ", ".join(sorted(p.name for p in folder.iterdir())[:5]) or "nothing"
        raise AdapterFileError(f"{folder} has no adapter_config.json, so it is not an adapter's folder; found {found}")
