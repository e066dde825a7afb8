"""`chairlift compile`: all kernels of a model, found and compiled without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift.attention.paged.gpu import LARGE_STEP
from chairlift.config import EngineConfig
from chairlift.engine.kernel_cache import kernels_of_model
from chairlift.errors import InvalidParameter
from chairlift.kernels.gpu import META, described_gpu, known_gpu, on_gpu
from chairlift.runner.gpu.shapes import MIXED_BUCKETS
from chairlift_lab.common.model_shapes import SHAPES
from tests.kernels.test_compilation import without_interpreter
from tests.kernels.test_plain_gpu import FAMILIES
from tests.kernels.tiny_config import CONFIG
from tests.models.test_families import CONFIGS

# Jobs share a process: each would import torch and Triton, and hash it.
PROGRAM = """
import json, sys, traceback
import torch
from chairlift.config import EngineConfig
from chairlift.core.plan import Chunk
from chairlift.core.request import Request
from chairlift.core.sampling.params import SamplingParams
from chairlift.engine.kernel_cache import _build, kernels_of_model
from chairlift.errors import ChairliftError
from chairlift.kernels.compilation.spec import KernelRecorder
from chairlift.kernels.gpu import described_gpu, known_gpu
from chairlift.runner.gpu.shapes import MIXED_BUCKETS

LARGE = {"load_format": "dummy", "device": "cuda", "max_batch_tokens": 2048, "max_batch_requests": 300}

def of_model(folder, gpu, more):
    options = {"load_format": "dummy", "max_batch_tokens": 512, "max_batch_requests": 8}
    return [json.loads(spec.text) for spec in kernels_of_model(folder, EngineConfig(**options | more), gpu)]

def count_of_family(folder):
    try:
        options = EngineConfig(load_format="dummy", max_batch_tokens=64, max_batch_requests=2)
        return len(kernels_of_model(folder, options, "h200"))
    except ChairliftError as error:
        return str(error)

def generic(folder, more):
    built = []
    with described_gpu(known_gpu("h200")), torch.inference_mode():
        load = lambda: built.append(_build(folder, EngineConfig(**LARGE | more)))
        KernelRecorder(90).record(load)
        shapes, kernels = built[0].shapes, built[0].preparation.kernels
        sampled = set(kernels.kernels_of(shapes.samples_of_all(), generic=True))
        every = [*map(shapes.decode, shapes.decode_buckets), *map(shapes.mixed, MIXED_BUCKETS)]
        missing = set(kernels.kernels_of(every, generic=True)) - sampled
        hopper = [any("hopper" in spec.name for spec in kernels.kernels_of([shape])) for shape in every]
        hopper = [shape.tokens for shape, found in zip(every, hopper) if shape.tiles and found]
        for singles, samples, longest, deepest in [(0, 0, 0, 0), (0, 2, 0, 9000), (3, 5, 9000, 0), (40, 130, 50, 9000)]:
            exact, captured = shapes.choose(
                tokens=2300, chunks=singles + 4, singles=singles, tiles=40, samples=samples, updates=9,
                longest=longest, deepest=deepest,
            )
            assert not captured
            missing |= set(kernels.kernels_of([exact])) - set(kernels.kernels_of(shapes.stand_ins(exact)))
        small, captured = shapes.choose(
            tokens=40, chunks=2, singles=1, tiles=1, samples=2, updates=9, longest=9000, deepest=9000
        )
        prompts = [spec for spec in kernels.kernels_of([small]) if "prefill" in spec.name]
        missing |= set(prompts) - set(kernels.kernels_of(shapes.beside_prompts(shapes.decode(1))))
        exact = [any("hopper" in spec.name for spec in kernels.kernels_of([exact]))]
    return [len(sampled), sorted(spec.name for spec in missing), hopper + exact]

def drafting(folder):
    built, recorder = [], KernelRecorder(90)

    def kernels(*chunks):
        made = [
            Chunk(Request("r", [0] * (start + count), SamplingParams(), max_new_tokens=9, arrival=0.0), start, count,
                  [0] * width, samples=False)
            for start, count, width in chunks
        ]
        return set(recorder.record(lambda: built[0].drafter._scores(made)))

    with described_gpu(known_gpu("h200")), torch.inference_mode():
        recorder.record(lambda: built.append(_build(folder, EngineConfig(speculate="layers:1", **LARGE))))
        warm = kernels((2, 2, 6)) | kernels((3, 1, 6))
        sizes = [[(0, 1, 1)], [(3, 16, 2)], [(40, 8, 3), (9, 4, 1)], [(5, 1, 16), (7, 1, 17)], [(0, 256, 16)] * 3]
        later = set().union(*(kernels(*chunks) for chunks in sizes))
    return [len(warm), sorted(spec.name for spec in later - warm)]

for name, *arguments in json.loads(sys.argv[1]):
    try:
        print(json.dumps(globals()[name](*arguments)))
    except Exception:
        print(json.dumps(traceback.format_exc()))
"""

LARGER = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
LONGER = LARGER | {"max_position_embeddings": 16384}
FORMATS: list[dict[str, Any]] = [
    {},
    {"quantization": "fp8"},
    {"quantization": "int4"},
    {"kv_dtype": "fp8"},
    {"batch_invariant": True},
]
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("h200", {}),
    ("l4", {}),
    ("h200", {"kv_dtype": "fp8"}),
    ("h200", {"batch_invariant": True}),
    ("h200", {"quantization": "fp8", "quantize_head": True}),
]
NORMS_BEHIND = ["gemma4", "olmo3"]


def run_jobs(folder: Path, jobs: Sequence[Sequence[Any]]) -> list[Any]:
    """What a process finds that would compile kernels, one result for each job; a text is an error."""
    file = folder / "program.py"
    file.write_text(PROGRAM)
    run = subprocess.run(
        [sys.executable, str(file), json.dumps(jobs)],
        env=without_interpreter(folder),
        capture_output=True,
        text=True,
        timeout=60 * len(jobs),
    )
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()[-len(jobs) :]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """The results of all jobs of this file, by test."""
    folder = tmp_path_factory.mktemp("jobs")

    def config(name: str, **changes: Any) -> str:
        (folder / name).mkdir()
        return str(write_config(folder / name, **changes))

    plain, large = config("plain"), config("large", **LONGER)
    shorter = {"num_hidden_layers": 5, "layer_types": ["sliding_attention"] * 4 + ["full_attention"]}
    wide = folder / "wide" / "config.json"
    wide.parent.mkdir()
    wide.write_text(json.dumps(SHAPES["gemma4-e2b"] | shorter | {"num_kv_shared_layers": 0}))
    jobs: dict[str, list[list[Any]]] = {
        "drafting": [["drafting", config("drafting", **LARGER, num_hidden_layers=2)]],
        "formats": [["generic", large, more] for more in FORMATS],
        "options": [["of_model", plain, gpu, more] for gpu, more in OPTIONS],
        "wide heads": [["of_model", str(wide), "h200", {}]],
    }
    for family in NORMS_BEHIND:
        jobs[family] = [["generic", config(family, **FAMILIES[family] | LONGER), {}]]
    results = iter(run_jobs(folder, [job for each in jobs.values() for job in each]))
    return {name: [next(results) for _ in each] for name, each in jobs.items()}


def test_passes_of_a_draft_network_launch_the_kernels_of_its_warm_up(found: dict[str, list[Any]]) -> None:
    """Otherwise requests would wait for a compilation when it catches up, or when a block table has another width."""
    ((count, missing),) = found["drafting"]
    assert missing == []
    assert 5 <= count <= 15


def test_the_generic_kernels_of_every_format_serve_all_steps(found: dict[str, list[Any]]) -> None:
    """Otherwise the first step of some size would wait for a compilation. The kernels of steps that are not captured
    are those of shapes that stand for them."""
    formats = found["formats"]
    assert [missing for _, missing, _ in formats] == [[]] * len(FORMATS)
    assert all(8 <= count <= 20 for count, _, _ in formats)
    # Large steps, captured or not, have the kernel for Hopper, unless the cache or the option rules it out.
    large = [*(bucket for bucket in MIXED_BUCKETS if bucket >= LARGE_STEP), True]
    assert [hopper for _, _, hopper in formats] == [large, large, large, [False], [False]]


@pytest.mark.parametrize("family", NORMS_BEHIND)
def test_the_generic_kernels_of_norms_behind_blocks_serve_all_steps(family: str, found: dict[str, list[Any]]) -> None:
    ((count, missing, _),) = found[family]
    assert missing == []
    assert 8 <= count <= 30


WALKED = ["hunyuan", "cohere qk norm", "stablelm parallel, qk norm"]
REFUSED = "has no kernels of ours there"


@pytest.mark.parametrize("names", [WALKED, pytest.param(list(CONFIGS), marks=pytest.mark.slow)], ids=["few", "all"])
def test_the_steps_of_every_family_can_be_walked_for_a_gpu(names: list[str], tmp_path: Path) -> None:
    """Otherwise an engine would fail at its start, which CI without a GPU would not see."""
    for name in names:
        CONFIGS[name]().save_pretrained(tmp_path / name)
    counts = run_jobs(tmp_path, [["count_of_family", str(tmp_path / name)] for name in names])
    found = dict(zip(names, counts, strict=True))
    assert {name: each for name, each in found.items() if not isinstance(each, int) and REFUSED not in each} == {}
    assert all(isinstance(found[name], int) for name in WALKED)


def write_config(folder: Path, **changes: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(CONFIG | changes))
    return file


def test_the_kernels_of_a_model_depend_on_its_options_and_the_gpu(found: dict[str, list[Any]]) -> None:
    plain, small, narrow, invariant, rounded = found["options"]
    names = {spec["name"] for spec in plain}
    assert {"begin_step_kernel", "decode_kernel", "_prefill_kernel", "product_kernel", "_sample_kernel"} <= names
    assert len({json.dumps(spec) for spec in plain}) == len(plain)
    assert {spec["arch"] for spec in plain} == {90}
    assert {spec["arch"] for spec in small} == {89}
    assert True in {spec["options"]["launch_pdl"] for spec in plain}
    assert {spec["options"]["launch_pdl"] for spec in small} == {False}
    cached = [spec["signature"]["keys_ptr"] for spec in narrow if spec["name"] == "decode_kernel"]
    assert set(cached) == {"*fp8e4nv"}
    in_one_order = {spec["name"] for spec in invariant}
    assert {"product_kernel", "_attention_kernel"} <= in_one_order
    assert not in_one_order & {"decode_kernel", "_prefill_kernel"}
    assert "_round_rows_kernel" in {spec["name"] for spec in rounded}
    assert {spec["signature"]["weight_ptr"] for spec in rounded if spec["name"] == "product_kernel"} == {"*fp8e4nv"}


def test_gemma_4_attends_by_kernels_although_its_heads_are_wide(found: dict[str, list[Any]]) -> None:
    """Else every request would be attended to by itself, kernel by kernel."""
    (specs,) = found["wide heads"]
    for name in ("decode_kernel", "_prefill_kernel"):
        dims = {dict(_constants(spec))["D"] for spec in specs if spec["name"] == name}
        assert dims == {256, 512}


def _constants(spec: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    names = list(spec["signature"])
    return ((names[path[0]], value) for path, value in spec["constants"])


def test_a_described_gpu_is_known_by_name_and_only_for_a_while() -> None:
    with described_gpu(known_gpu("H200")):
        assert on_gpu(META)
    assert not on_gpu(META)
    assert not on_gpu(torch.device("cpu"))
    with pytest.raises(InvalidParameter, match="'h900' is not a GPU known by name; known are a100"):
        known_gpu("h900")


def test_draft_networks_are_refused(tmp_path: Path) -> None:
    config = EngineConfig(load_format="dummy", speculate="layers:2")
    with pytest.raises(InvalidParameter, match="draft networks are compiled at the start"):
        kernels_of_model(str(write_config(tmp_path)), config, "h200")
