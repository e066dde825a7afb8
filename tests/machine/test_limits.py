"""Cores, memory nodes and the limits of control groups, from made-up system folders."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from chairlift.machine import hardware


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(hardware, "MOUNT", tmp_path / "cgroup")
    monkeypatch.setattr(hardware, "MEMBERSHIP", tmp_path / "membership")
    (tmp_path / "membership").write_text("0::/\n")
    return tmp_path / "cgroup"


def put(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def test_without_a_limit_all_cores_count(mount: Path) -> None:
    assert hardware.cpu_quota() == math.inf
    put(mount, cpu__max="max 100000", memory__max="max")
    assert (hardware.cpu_quota(), hardware.memory_left()) == (math.inf, None)


def test_the_strictest_group_of_version_2_counts(mount: Path) -> None:
    (mount.parent / "membership").write_text("0::/pod/container\n")
    put(mount, cpu__max="max 100000")
    put(mount / "pod", cpu__max="150000 100000", memory__max="1000", memory__current="100")
    put(mount / "pod" / "container", cpu__max="400000 100000", memory__max="5000", memory__current="100")
    assert (hardware.cpu_quota(), hardware.memory_left()) == (1.5, 900)


@pytest.mark.parametrize("controllers", ["cpu,cpuacct", "cpu"])
def test_version_1_counts(controllers: str, mount: Path) -> None:
    (mount.parent / "membership").write_text(f"4:memory:/job\n3:{controllers}:/job\n0::/\n")
    put(mount / controllers, cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    put(mount / controllers / "job", cpu__cfs_quota_us="50000", cpu__cfs_period_us="100000")
    unlimited = str((1 << 63) - 4096)
    put(mount / "memory", memory__limit_in_bytes=unlimited, memory__usage_in_bytes="7")
    assert hardware.memory_left() is None
    statistics = "inactive_file 1\ntotal_inactive_file 300\ntotal_active_file 50"
    put(mount / "memory" / "job", memory__limit_in_bytes="1000", memory__usage_in_bytes="900", memory__stat=statistics)
    assert (hardware.cpu_quota(), hardware.memory_left()) == (0.5, 400)


def test_a_path_on_the_host_does_not_hide_the_limit_of_the_container(mount: Path) -> None:
    (mount.parent / "membership").write_text("0::/docker/0123\n")
    put(mount, cpu__max="200000 100000")
    assert hardware.cpu_quota() == 2.0


def test_mapped_weights_are_not_free_memory(mount: Path) -> None:
    put(mount, memory__max="1000", memory__current="900", memory__stat="inactive_file 300\nactive_file 400")
    assert hardware.memory_left() == 400
    assert hardware.memory_left(mapped=350) == 450  # the other 350 bytes of files can be dropped
    assert hardware.memory_left(mapped=700) == 100


def test_two_threads_of_a_core_count_once(tmp_path: Path, mount: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "CPUS", tmp_path / "cpu")
    monkeypatch.setattr(hardware, "usable_processors", lambda: [0, 1, 4, 5])
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for processor in range(8):
        pair = f"{processor % 4},{processor % 4 + 4}"
        put(tmp_path / "cpu" / f"cpu{processor}" / "topology", thread_siblings_list=pair)
    assert hardware.physical_cores() == 2
    assert hardware.default_threads() == 2
    put(mount, cpu__max="110000 100000")
    assert hardware.default_threads() == 2
    put(mount, cpu__max="90000 100000")
    assert hardware.default_threads() == 1
    put(mount, cpu__max="max 100000")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert hardware.default_threads() == 1


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux only")
def test_the_affinity_mask_counts() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert hardware.usable_processors() == [min(before)]
        assert hardware.default_threads() == 1
    finally:
        os.sched_setaffinity(0, before)


def test_nodes_without_usable_processors_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "NODES", tmp_path)
    monkeypatch.setattr(hardware, "usable_processors", lambda: [1, 9])
    for node, processors in enumerate(("0-3,8-9", "4-7", "")):
        put(tmp_path / f"node{node}", cpulist=processors)
    assert hardware.usable_nodes() == [0]
    put(tmp_path / "node1", cpulist="4-7,9")
    assert hardware.usable_nodes() == [0, 1]


def test_memory_is_interleaved_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    policies: list[tuple[int, list[int]]] = []
    monkeypatch.setattr(hardware, "usable_nodes", lambda: [0, 2])
    monkeypatch.setattr(hardware, "_set_policy", lambda policy, nodes: bool(policies.append((policy, nodes)) or True))
    with hardware.interleaved():
        assert policies == [(hardware.INTERLEAVE, [0, 2])]
    assert policies[1:] == [(hardware.DEFAULT, [])]


def test_the_system_takes_the_policy() -> None:
    nodes = hardware.usable_nodes()
    if not nodes:
        pytest.skip("this system has no memory nodes")
    if not hardware._set_policy(hardware.INTERLEAVE, nodes):
        pytest.skip("a container may forbid it")
    assert hardware._set_policy(hardware.DEFAULT, [])
