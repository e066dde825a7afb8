"""`chairlift bench`: measure."""

from __future__ import annotations

import typer

from chairlift.lab.bench.attention.cli import bench_attention
from chairlift.lab.bench.chunking.cli import bench_chunking
from chairlift.lab.bench.claims.cli import bench_claims
from chairlift.lab.bench.dashboard.cli import bench_dashboard
from chairlift.lab.bench.kernels.cli import bench_kernels
from chairlift.lab.bench.latency.cli import bench_latency
from chairlift.lab.bench.long_context.cli import bench_long_context
from chairlift.lab.bench.policies.cli import bench_policies
from chairlift.lab.bench.prefix.cli import bench_prefix
from chairlift.lab.bench.profile.cli import bench_profile
from chairlift.lab.bench.quality.cli import bench_quality
from chairlift.lab.bench.serve.cli import bench_serve
from chairlift.lab.bench.shapes.cli import bench_shapes
from chairlift.lab.bench.speculation.cli import bench_speculation
from chairlift.lab.bench.stress.cli import bench_stress
from chairlift.lab.bench.throughput.cli import bench_throughput
from chairlift.terminal.options import examples

bench_app = typer.Typer(
    help="Measure the engine, alone and against others.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    epilog=examples("chairlift bench throughput", "chairlift bench throughput --help"),
)

bench_app.command(
    "throughput",
    epilog=examples(
        "chairlift bench throughput",
        "chairlift bench throughput --requests 16 --prompt-len 128 --output-len 32:64 --engines chairlift",
        "chairlift bench throughput --workload workload.json --concurrency 32 --json result.json",
        "chairlift bench throughput --peers llama.cpp,openvino --concurrency 1,8,32 --repeat 3 "
        "--peer-python llama.cpp=llama/bin/python --peer-python openvino=ov/bin/python "
        "--peer-model openvino=OV_FOLDER",
    ),
)(bench_throughput)
bench_app.command(
    "latency",
    epilog=examples(
        "chairlift bench latency",
        "chairlift bench latency Qwen/Qwen3-0.6B --batch 1 --prompt-tokens 128,2048 --output-tokens 128",
        "chairlift bench latency --model-config llama3-8b --device cuda --batch 1,8,32,128 --json result.json",
    ),
)(bench_latency)
bench_app.command(
    "kernels",
    epilog=examples(
        "chairlift bench kernels",
        "chairlift bench kernels --quantization int8 --kernels products --rows 1,8,32",
        "chairlift bench kernels --model-config qwen3-0.6b --device cuda --batch 1,64,256 --json result.json",
    ),
)(bench_kernels)
bench_app.command(
    "long-context",
    epilog=examples(
        "chairlift bench long-context --lengths 1024,4096",
        "chairlift bench long-context --model-config llama3-8b --device cuda --json result.json",
    ),
)(bench_long_context)
bench_app.command(
    "attention",
    epilog=examples(
        "chairlift bench attention",
        "chairlift bench attention --experiments tiling --sizes 1024,4096 --plot tiling.png",
    ),
)(bench_attention)
bench_app.command(
    "prefix", epilog=examples("chairlift bench prefix", "chairlift bench prefix --scenarios agents --tools 1000 -q")
)(bench_prefix)
bench_app.command(
    "profile",
    epilog=examples(
        "chairlift bench profile --out profile.json",
        "chairlift bench profile --model path/to/model --out profile.json",
        "chairlift simulate --profile profile.json --rate 1",
    ),
)(bench_profile)
bench_app.command(
    "shapes",
    epilog=examples(
        "chairlift bench shapes qwen3-0.6b",
        "chairlift bench shapes llama3-8b --cases decode-1,load-256 --json result.json",
        "chairlift bench shapes path/to/config.json --device cpu --cases decode-2 --scale 16",
        "chairlift bench shapes qwen3-0.6b --peer vllm --peer-python vllm/bin/python",
    ),
)(bench_shapes)
bench_app.command(
    "serve",
    epilog=examples(
        "chairlift bench serve",
        "chairlift bench serve --compare-offline --repeat 3 --json result.json --plot result.png",
        "chairlift bench serve --rate 2 --arrivals bursty --max-ttft-ms 2000 --max-tpot-ms 150",
        "chairlift bench serve --url http://localhost:8000 --concurrency 32 --prompt-len 256 --output-len 128",
        "chairlift bench serve --trace azure_2023_conversation.csv --trace-speed 0.2 --duration 120",
    ),
)(bench_serve)
bench_app.command(
    "policies",
    epilog=examples(
        "chairlift bench policies",
        "chairlift bench policies --strategies continuous,continuous/padded,static/padded --arrivals at-once",
    ),
)(bench_policies)
bench_app.command(
    "claims",
    epilog=examples("chairlift bench claims", "chairlift bench claims --claims tiling,cache --plot claims.png"),
)(bench_claims)
bench_app.command(
    "chunking",
    epilog=examples("chairlift bench chunking", "chairlift bench chunking --targets-ms 100,200 --plot chunking.png"),
)(bench_chunking)
bench_app.command(
    "speculation",
    epilog=examples(
        "chairlift bench speculation",
        "chairlift bench speculation --proposers ngram,draft:smollm2-135m --scenarios chat --plot speed.png",
    ),
)(bench_speculation)
bench_app.command(
    "stress",
    epilog=examples(
        "chairlift bench stress --seconds 10",
        "chairlift bench stress --device cuda --seconds 180 --speculate ngram --json result.json",
        "chairlift bench stress --family qwen3_moe --batch-invariant",
    ),
)(bench_stress)
bench_app.command(
    "dashboard",
    epilog=examples(
        "chairlift bench dashboard --json result.json",
        "chairlift bench dashboard --streams 64 --pairs 2 --seconds 5 --frames",
    ),
)(bench_dashboard)
bench_app.command(
    name="quality",
    epilog=examples(
        "chairlift bench quality --json quality.json --plot quality.png",
        "chairlift bench quality --model path/to/model --modes 'int8, KV bfloat16'",
    ),
)(bench_quality)
