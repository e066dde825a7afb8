"""The models in the caches of this machine, our own and that of the Hugging Face hub: finding and removing them."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from chairlift.errors import InvalidParameter, ModelNotFound
from chairlift.loading.hub import fetched_in_part
from chairlift.loading.known_models import WheelModel, cache_dir, cached_folder, hub_cache, known_model, known_models
from chairlift.loading.resolve import existing_path, is_hub_id, unknown_model

WEIGHTS = (".safetensors", ".safetensors.index.json")
COMPLETE, INCOMPLETE, UNUSABLE = "complete", "incomplete", "no safetensors"


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model in a cache."""

    name: str  # what commands take
    hub_id: str
    path: Path  # its file, or the folder of its files
    size: int  # bytes on the disk
    last_used: float  # seconds since the epoch, as the file system says
    state: str = COMPLETE
    packed: tuple[Path, ...] = ()  # weights that were packed for this CPU from its files

    @property
    def packed_size(self) -> int:
        return sum(path.stat().st_size for path in self.packed)


def local_models() -> list[LocalModel]:
    """All models in the caches, the one used last first."""
    return sorted([*_from_wheels(), *_from_hub()], key=lambda model: -model.last_used)


def local_model(name: str) -> LocalModel:
    """The model in a cache that `name` means; raises for what is in none."""
    known = known_model(name)
    meant = {name} if known is None else {name, known.name} - ({known.name} if name == known.hub_id else set())
    for model in local_models():
        if model.name in meant or (model.hub_id == name and not isinstance(known, WheelModel)):
            return model
    if known is not None or is_hub_id(name):
        raise ModelNotFound(f"{name} is not on this machine; `chairlift list` shows what is")
    if existing_path(name) is not None:
        raise InvalidParameter("model", f"{name!r} is a file or folder of yours in no cache; delete it yourself")
    raise unknown_model(name)


def _from_wheels() -> Iterator[LocalModel]:
    for model in known_models():
        if isinstance(model, WheelModel) and model.path.is_file():
            status = model.path.stat()
            state = COMPLETE if model.cached else INCOMPLETE
            used, packed = max(status.st_atime, status.st_mtime), _packed_from(model.path)
            yield LocalModel(model.name, model.hub_id, model.path, status.st_size, used, state, packed)


def _from_hub() -> Iterator[LocalModel]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir(hub_cache())
    except CacheNotFound:
        return
    for repository in cache.repos:
        if repository.repo_type != "model":
            continue
        known = known_model(repository.repo_id)
        name = repository.repo_id if known is None or isinstance(known, WheelModel) else known.name
        files = {file.file_name for revision in repository.revisions for file in revision.files}
        state = COMPLETE if cached_folder(repository.repo_id) else INCOMPLETE
        begun = fetched_in_part(repository.repo_id)
        if state is INCOMPLETE and not begun and not any(file.endswith(WEIGHTS) for file in files):
            state = UNUSABLE
        packed = tuple(path for revision in repository.revisions for path in _packed_from(revision.snapshot_path))
        used = max(repository.last_accessed, repository.last_modified)
        path, size = repository.repo_path, repository.size_on_disk + begun
        yield LocalModel(name, repository.repo_id, path, size, used, state, packed)


def _packed_from(path: Path) -> tuple[Path, ...]:
    """The packed weights of a checkpoint, which are named after it."""
    form = re.compile(rf"{re.escape(path.stem)}-[0-9a-f]{{12}}\.(weights|lock)")
    folder = cache_dir() / "weights"
    return tuple(file for file in sorted(folder.glob("*")) if form.fullmatch(file.name)) if folder.is_dir() else ()


def remove(model: LocalModel) -> int:
    """Delete a model from its cache, and its packed weights; return the bytes that are free now."""
    freed = model.size + model.packed_size
    is_own = model.path.parent.parent.resolve() == (cache_dir() / "models").resolve()
    folder = model.path.parent if is_own else model.path
    if folder.is_symlink():
        raise InvalidParameter("model", f"{folder} is a link to {folder.resolve()}; delete both yourself")
    if not is_own:
        _remove_from_hub(folder)
    if os.path.lexists(folder):  # The hub's library only warns of what it cannot delete.
        shutil.rmtree(folder)
    for path in model.packed:
        path.unlink(missing_ok=True)
    return freed


def _remove_from_hub(folder: Path) -> None:
    """Delete a model as the hub's library does, which knows what models share."""
    from huggingface_hub import scan_cache_dir

    cache = scan_cache_dir(hub_cache())
    # The library looks for commits in all models, and a copy of a model has the same ones.
    alone = replace(cache, repos=frozenset(each for each in cache.repos if each.repo_path == folder))
    commits = [revision.commit_hash for repository in alone.repos for revision in repository.revisions]
    alone.delete_revisions(*commits).execute()
