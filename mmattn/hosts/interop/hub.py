"""Download and upload of adapters: repositories of the Hugging Face hub with the files that `save_adapter` writes."""

from __future__ import annotations

import os
import re
from os import PathLike
from typing import TypedDict

from typing_extensions import Unpack

from mmattn.adapters.files import CARD, CONFIG, TENSORS
from mmattn.errors import AdapterFileError, ConfigError

#: What a folder may hold beside the adapter: what a pipeline needs to run it.
FURTHER = ("pipeline_config.json", "encoder.safetensors")
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


def local_folder(folder: str | PathLike[str], revision: str | None) -> str | PathLike[str]:
    """Return the local folder of an adapter: the folder itself, or the downloaded files of that repository."""
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
            f"there is no folder {folder!r}, and no adapter of that name{at} on the hub or in its cache ({error}): "
            "correct the name, or save the adapter there first"
        ) from error


class HubOptions(TypedDict, total=False):
    """Options of an upload, as in `transformers.PreTrainedModel.push_to_hub`."""

    private: bool | None
    revision: str | None
    token: str | None
    commit_message: str | None


def upload(folder: str | PathLike[str], repository: str, **options: Unpack[HubOptions]) -> str:
    """Upload the folder of an adapter, creating a missing repository, and return the URL of the commit."""
    from huggingface_hub import HfApi

    hub, revision = HfApi(token=options.get("token")), options.get("revision")
    try:
        repo = hub.create_repo(repository, private=options.get("private"), exist_ok=True)
        if revision is not None:
            hub.create_branch(repo.repo_id, branch=revision, exist_ok=True)
        commit = hub.upload_folder(
            repo_id=repo.repo_id,
            folder_path=os.fspath(folder),
            revision=revision,
            commit_message=options.get("commit_message"),
            allow_patterns=[CONFIG, TENSORS, CARD, *FURTHER],
        )
    except Exception as error:  # its client lets the errors of several libraries through
        raise AdapterFileError(
            f"the adapter could not be uploaded to {repository!r} ({error}): log in with `hf auth login`, give "
            "token=, or name a repository that is yours"
        ) from error
    return str(commit)
