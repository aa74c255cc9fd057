"""Download and upload of adapters: repositories of the Hugging Face hub with the files that `save_adapter` writes."""

from __future__ import annotations

import os
import re
from os import PathLike

from mmattn.adapters.serialization import CARD, CONFIG, TENSORS
from mmattn.errors import AdapterFileError, ConfigError

#: What a folder may hold beside the adapter: what a pipeline needs to run it.
FURTHER = ("pipeline_config.json", "encoder.safetensors")
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


def local_folder(folder: str | PathLike[str], revision: str | None) -> str | PathLike[str]:
    """The local folder of an adapter: the folder itself, or the downloaded files of a repository of that name.

    Only the adapter's own files are downloaded, once for each commit, into the cache shared by Hugging Face libraries.

    Args:
        folder: a path, or "org/name" on the hub.
        revision: branch, tag or commit of a repository.

    Raises:
        AdapterFileError: neither a folder nor a repository that can be reached or is in the cache.
        ConfigError: a revision of a folder.
    """
    if os.path.exists(folder) or not (isinstance(folder, str) and _REPOSITORY.fullmatch(folder)):
        if revision is not None:
            raise ConfigError(f"revision={revision!r} is for names on the hub, and {os.fspath(folder)!r} is a path")
        return folder
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(folder, revision=revision, allow_patterns=[CONFIG, TENSORS, CARD, *FURTHER])
    except (OSError, ValueError) as error:
        at = "" if revision is None else f" at revision {revision!r}"
        raise AdapterFileError(
            f"there is no folder {folder!r}, and no adapter of that name{at} on the hub that is reachable or in its "
            f"cache ({error}): correct the name, or save the adapter there first"
        ) from error


def upload(
    folder: str | PathLike[str],
    repository: str,
    *,
    private: bool | None,
    revision: str | None,
    token: str | None,
    message: str,
) -> str:
    """Upload the folder of an adapter, creating the repository where it is missing; returns the address of the commit.

    Args:
        folder: of the adapter, and of what a pipeline needs to run it.
        repository: "org/name".
        private: whether a new repository is private.
        revision: a branch, created where it is missing.
        token: of the hub; None for the one that is logged in.
        message: of the commit.

    Raises:
        AdapterFileError: the hub refused it, or cannot be reached.
    """
    from huggingface_hub import HfApi

    hub = HfApi(token=token)
    try:
        repo = hub.create_repo(repository, private=private, exist_ok=True)
        if revision is not None:
            hub.create_branch(repo.repo_id, branch=revision, exist_ok=True)
        commit = hub.upload_folder(
            repo_id=repo.repo_id,
            folder_path=os.fspath(folder),
            revision=revision,
            commit_message=message,
            allow_patterns=[CONFIG, TENSORS, CARD, *FURTHER],
        )
    except Exception as error:  # its client lets the errors of several libraries through
        raise AdapterFileError(
            f"the adapter could not be uploaded to {repository!r} ({error}): log in with `hf auth login`, give "
            "token=, or name a repository that is yours"
        ) from error
    return str(commit)
