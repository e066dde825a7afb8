"""Models of the Hugging Face hub: what of them is in its cache, and how the rest is fetched and checked."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from io import BufferedWriter, FileIO
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

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
RESUMED_BYTES = 64 << 20  # Smaller files are fetched anew after an interruption.
MOST_OVER_HTTP = 50_000_000_000  # The hub serves larger files by a protocol of its own only.
PARTIAL = ".partial"  # how the names of files end that are fetched in part
STREAMS = 4  # files at a time


def fetch_from_hub(repository: str, *, progress: bool = True) -> Path:
    """Return the folder of a model, downloading what is missing; an interrupted download is continued."""
    from huggingface_hub import snapshot_download

    with _errors_explained(repository), _progress_bars(progress):
        missing = [] if cached_folder(repository) else _missing_files(repository)
        large = [file for file in missing if file.lfs is not None and RESUMED_BYTES <= file.size <= MOST_OVER_HTTP]
        _require_space(repository, sum(file.size for file in missing) - fetched_in_part(repository))
        if large:
            others = [*IGNORED_FILES, *(file.path for file in large)]
            first = Path(snapshot_download(repository, allow_patterns=HUB_FILES, ignore_patterns=others))
            _fetch_large(repository, first, large, progress)
        folder = Path(snapshot_download(repository, allow_patterns=HUB_FILES, ignore_patterns=IGNORED_FILES))
        if modules := module_folders(folder):  # They come from the same commit, after which the folder is named.
            settings = [f"{each}/config.json" for each in modules]
            snapshot_download(repository, revision=folder.name, allow_patterns=settings)
    if not any(folder.glob("*.safetensors")):
        raise ModelNotFound(f"{repository!r} has no safetensors; if it has GGUF files, download one and give its path")
    for file in missing:
        if file not in large and file.lfs is not None:
            _check_sum(repository, file, folder / file.path, progress)
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


def fetched_in_part(repository: str) -> int:
    """Bytes of files that an interrupted download has left."""
    blobs = hub_cache() / f"models--{repository.replace('/', '--')}" / "blobs"
    return sum(path.stat().st_size for path in blobs.glob(f"*{PARTIAL}"))


def _fetch_large(repository: str, snapshot: Path, files: list[RepoFile], progress: bool) -> None:
    """Download large files into the hub's cache, from the place where an earlier download stopped.

    The hub's own client begins such a file again in every process.
    """
    stopping = Event()
    with ThreadPoolExecutor(STREAMS) as pool:
        downloads = [pool.submit(_fetch_file, repository, snapshot, file, progress, stopping) for file in files]
        try:
            for download in downloads:
                download.result()
        except BaseException:  # also Ctrl-C
            stopping.set()
            raise


def _fetch_file(repository: str, snapshot: Path, file: RepoFile, progress: bool, stopping: Event) -> None:
    from filelock import FileLock
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    url = hf_hub_url(repository, file.path, revision=snapshot.name)
    name = get_hf_file_metadata(url).etag  # The cache names the content after it.
    if name is None or stopping.is_set():
        return
    blob = snapshot.parent.parent / "blobs" / name
    partial = blob.with_name(f"{name}{PARTIAL}")
    partial.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{partial}.lock"):
        if blob.exists():  # Another process has fetched it during the wait.
            return
        with _Stoppable(partial.open("ab", buffering=0), stopping) as target:
            http_get(
                url,
                target,
                resume_size=target.tell(),
                headers=build_hf_headers(),
                expected_size=file.size,
                displayed_filename=file.path,
            )
        _check_sum(repository, file, partial, progress)
        partial.replace(blob)


class _Stoppable(BufferedWriter):
    """A file that can no longer be written once `stopping` is set, which ends the thread that writes it."""

    def __init__(self, raw: FileIO, stopping: Event) -> None:
        super().__init__(raw)
        self._stopping = stopping

    def write(self, data: Any) -> int:
        if self._stopping.is_set():
            raise ChairliftError("another file of the model could not be fetched")
        return super().write(data)


def _check_sum(repository: str, file: RepoFile, path: Path, progress: bool) -> None:
    """Compare a file that was downloaded with the SHA-256 that the hub states; delete it if they differ."""
    from chairlift.progress import watch

    with watch(enabled=progress) as note, path.open("rb") as stored:
        note(f"checking {file.path}")
        digest = hashlib.file_digest(stored, "sha256").hexdigest()
    if file.lfs is not None and digest != file.lfs.sha256:
        path.resolve().unlink()  # The link in a snapshot leads to it.
        path.unlink(missing_ok=True)
        raise CorruptCheckpoint(
            f"{repository}: {file.path} came with the SHA-256 {digest} where {file.lfs.sha256} is expected; it is "
            "deleted, so try again"
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
        return f"{repository!r} is not in the cache ({hub_cache()}), and HF_HUB_OFFLINE forbids fetching it"
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
