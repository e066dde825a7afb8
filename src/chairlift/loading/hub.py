"""Models of the Hugging Face hub: what of them is in its cache, and how the rest is fetched and checked."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from chairlift.errors import ChairliftError, CorruptCheckpoint, ModelNotFound
from chairlift.loading.config_file import MODELOPT_FILE
from chairlift.loading.embedding_config import module_folders
from chairlift.loading.known_models import cached_folder, hub_cache
from chairlift.options import format_bytes

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoFile

# Weights, settings and tokenizers. Nothing pickled and no code is ever fetched.
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
IGNORED_FILES = ["*/*", "consolidated*"]  # other layouts of the same weights


def fetch_from_hub(repository: str, *, progress: bool = True) -> Path:
    """Return the folder of a model, downloading what is missing. Files that are complete are never fetched again."""
    from huggingface_hub import snapshot_download

    with _errors_explained(repository), _progress_bars(progress):
        missing = [] if cached_folder(repository) else _missing_files(repository)
        _require_space(repository, sum(file.size for file in missing))
        folder = Path(snapshot_download(repository, allow_patterns=HUB_FILES, ignore_patterns=IGNORED_FILES))
        if modules := module_folders(folder):  # They come from the same commit, after which the folder is named.
            settings = [f"{each}/config.json" for each in modules]
            snapshot_download(repository, revision=folder.name, allow_patterns=settings)
    if not any(folder.glob("*.safetensors")):
        raise ModelNotFound(f"{repository!r} has no safetensors; if it has GGUF files, download one and give its path")
    _check_sums(repository, folder, missing, progress)
    return folder


def config_from_hub(repository: str) -> Path:
    """The path of a model's config.json; all that is downloaded is this and what else says how weights are stored."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    with _errors_explained(repository):
        config = Path(hf_hub_download(repository, "config.json"))
        with suppress(EntryNotFoundError):
            hf_hub_download(repository, MODELOPT_FILE, revision=config.parent.name)
        return config


# ---- before and after a download --------------------------------------------------------------------------------


def _missing_files(repository: str) -> list[RepoFile]:
    """The files of a model that are not in the cache, with their sizes and checksums."""
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.hf_api import RepoFile
    from huggingface_hub.utils import filter_repo_objects

    api = HfApi()
    commit = api.model_info(repository).sha
    files = [file for file in api.list_repo_tree(repository, revision=commit) if isinstance(file, RepoFile)]
    wanted = filter_repo_objects(
        files, allow_patterns=HUB_FILES, ignore_patterns=IGNORED_FILES, key=lambda file: file.path
    )
    return [
        file for file in wanted if not isinstance(try_to_load_from_cache(repository, file.path, revision=commit), str)
    ]


def _require_space(repository: str, needed: int) -> None:
    """Raise before a download that the disk has no room for."""
    folder = hub_cache()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ModelNotFound(
            f"{repository} needs {format_bytes(needed)} more in {hub_cache()}, where {format_bytes(free)} are free; "
            "make room (chairlift rm MODEL), or choose another disk with the environment variable HF_HOME"
        )


def _check_sums(repository: str, folder: Path, fetched: list[RepoFile], progress: bool) -> None:
    """Compare the files that were just downloaded with the SHA-256 that the hub states, where it does."""
    from chairlift.progress import watch

    with watch(enabled=progress) as note:
        for file in fetched:
            path = folder / file.path
            if file.lfs is None or not path.exists():
                continue
            note(f"checking {file.path}")
            with path.open("rb") as stored:
                digest = hashlib.file_digest(stored, "sha256").hexdigest()
            if digest != file.lfs.sha256:
                path.resolve().unlink()  # The link in the snapshot leads to it.
                path.unlink(missing_ok=True)
                raise CorruptCheckpoint(
                    f"{repository}: {file.path} came with the SHA-256 {digest} where {file.lfs.sha256} is expected; "
                    "it is deleted, so try again"
                )


@contextmanager
def _progress_bars(shown: bool) -> Iterator[None]:
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if shown or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


# ---- errors -----------------------------------------------------------------------------------------------------


@contextmanager
def _errors_explained(repository: str) -> Iterator[None]:
    try:
        yield
    except ChairliftError:
        raise
    except Exception as error:  # the hub's errors and those of its HTTP library
        raise ModelNotFound(_explanation(repository, error)) from error


def _explanation(repository: str, error: BaseException) -> str:
    """What went wrong, and what can be done about it."""
    from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError

    causes = list(_causes(error))
    page = f"https://huggingface.co/{repository}"
    if any(isinstance(cause, GatedRepoError) for cause in causes):
        return (
            f"{repository!r} is gated: accept its licence at {page}, then give a token of your account in the "
            "environment variable HF_TOKEN, or run `hf auth login`"
        )
    if any(isinstance(cause, RepositoryNotFoundError) for cause in causes):
        return (
            f"there is no model {repository!r} on the Hugging Face hub; if it is a private one, give a token in the "
            "environment variable HF_TOKEN"
        )
    if any(isinstance(cause, OfflineModeIsEnabled) for cause in causes):
        return f"{repository!r} is not in the cache ({hub_cache()}), and HF_HUB_OFFLINE forbids to fetch it"
    reason = getattr(causes[-1], "strerror", None) or str(causes[-1]) or type(causes[-1]).__name__
    return (
        f"{repository!r} could not be downloaded from the Hugging Face hub ({reason.strip().splitlines()[0]}); check "
        "the name and the connection, or give the path of a checkpoint"
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that it was raised from."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__
