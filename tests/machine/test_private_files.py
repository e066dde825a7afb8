"""Folders and files that other users could change are refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from chairlift.machine import files
from chairlift.machine.files import create_private, open_private, private_folder, require_private_content

STRANGER = 54_321  # a user that does not exist
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")


def open_to_all(path: Path) -> None:
    path.chmod(0o777)


def give_away(path: Path) -> None:
    os.chown(path, STRANGER, -1)


SPOILED = [
    pytest.param(open_to_all, "can be written by other users", id="writable"),
    pytest.param(give_away, "belongs to another user", id="foreign", marks=as_root),
]


@pytest.mark.parametrize(("spoil", "problem"), SPOILED)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_every_folder_of_the_path_counts(
    spoil: Callable[[Path], None], problem: str, depth: int, tmp_path: Path
) -> None:
    folder = tmp_path / "above" / "cache" / "version"
    assert private_folder(folder) == folder.resolve()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert private_folder(folder) == folder.resolve()
    spoil([folder, *folder.parents][depth])
    with pytest.raises(PermissionError, match=problem):
        private_folder(folder)


def test_a_sticky_folder_may_lie_above_but_not_hold_the_files(tmp_path: Path) -> None:
    sticky = tmp_path / "shared"
    sticky.mkdir()
    sticky.chmod(0o1777)
    assert private_folder(sticky / "mine") == (sticky / "mine").resolve()
    with pytest.raises(PermissionError, match="can be written by other users"):
        private_folder(sticky)


def test_a_link_is_followed_once(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert private_folder(tmp_path / "link") == tmp_path.resolve() / "real"


def test_a_group_may_write_if_it_has_no_other_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = private_folder(tmp_path / "cache")
    folder.chmod(0o770)
    monkeypatch.setattr(files, "_only_own", lambda group: group == folder.stat().st_gid)
    private_folder(folder)
    monkeypatch.setattr(files, "_only_own", lambda group: False)
    with pytest.raises(PermissionError, match="can be written by other users"):
        private_folder(folder)


def test_members_of_groups() -> None:
    assert files._only_own(STRANGER)  # a group without a name and members
    others = {user.pw_gid for user in files.pwd.getpwall() if user.pw_uid not in (0, os.geteuid())}
    assert not any(files._only_own(group) for group in others)


@pytest.mark.parametrize(("spoil", "problem"), SPOILED)
def test_what_a_folder_holds_counts(spoil: Callable[[Path], None], problem: str, tmp_path: Path) -> None:
    folder = private_folder(tmp_path / "cache")
    folder.chmod(0o755)
    inner = folder / "inner"
    inner.mkdir()
    file = inner / "kernel.nbi"
    file.write_bytes(b"")
    require_private_content(folder)
    spoil(file)
    with pytest.raises(PermissionError, match=problem):
        require_private_content(folder)
    file.unlink()
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="is neither a file nor a folder"):
        require_private_content(folder)


@pytest.mark.parametrize(("spoil", "problem"), SPOILED)
def test_only_an_own_file_is_read(spoil: Callable[[Path], None], problem: str, tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"own")
    with open(open_private(file), "rb") as opened:
        assert opened.read() == b"own"
    (tmp_path / "link").symlink_to(file)
    with pytest.raises(OSError, match="symbolic links"):
        open_private(tmp_path / "link")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PermissionError, match="is not a file"):
        open_private(tmp_path / "pipe")
    spoil(file)
    with pytest.raises(PermissionError, match=problem):
        open_private(file)


def test_a_new_file_replaces_an_own_one_and_nothing_else(tmp_path: Path) -> None:
    file, victim = tmp_path / "weights.partial", tmp_path / "victim"
    victim.write_text("precious")
    for _ in range(2):
        os.close(create_private(file))
        assert file.stat().st_mode & 0o777 == 0o600
    file.unlink()
    file.symlink_to(victim)
    with pytest.raises(PermissionError, match="is a link, or belongs to another user"):
        create_private(file)
    assert victim.read_text() == "precious"


@as_root
def test_a_new_file_does_not_replace_a_foreign_one(tmp_path: Path) -> None:
    file = tmp_path / "weights.partial"
    file.write_text("")
    give_away(file)
    with pytest.raises(PermissionError, match="belongs to another user"):
        create_private(file)
