"""`chairlift bench profile`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chairlift.errors import InvalidParameter
from chairlift.progress import Note
from chairlift.terminal.options import EngineOptions, given, refuse_given
from chairlift.terminal.tables import Column, Line, Table, comparison_table
from chairlift_lab.bench.base import BenchResult, bench
from chairlift_lab.report.json_report import check_writable, machine

if TYPE_CHECKING:
    from chairlift.config import EngineConfig
    from chairlift.engine.engine import Engine
    from chairlift_lab.bench.profile.run import CostProfile
    from chairlift_lab.planning.run import ReplicaSettings

_RUN = "The recorded run"
_OPTIONS_OF_THE_RUN = ("requests", "prompt_len", "output_len", "load", "seed")


@bench(
    "profile",
    "chairlift bench profile --out profile.json",
    "chairlift bench profile --model path/to/model --out profile.json",
    "chairlift simulate --profile profile.json --rate 1",
    report=None,
)
def bench_profile(
    context: typer.Context,
    engine: EngineOptions,
    note: Note,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The JSON file to write.")] = Path("profile.json"),
    rounds: Annotated[int, typer.Option(help="Rounds; more of them give better figures.")] = 3,
    record: Annotated[
        bool,
        typer.Option(
            "--record", help="Also record a run with traffic in the profile, and compare the simulator with it."
        ),
    ] = False,
    requests: Annotated[int, typer.Option(help="Number of requests.", rich_help_panel=_RUN)] = 100,
    prompt_len: Annotated[
        str, typer.Option(metavar="LOW:HIGH", help="Prompt tokens, log-uniform.", rich_help_panel=_RUN)
    ] = "16:256",
    output_len: Annotated[
        str, typer.Option(metavar="LOW:HIGH", help="Output tokens, log-uniform.", rich_help_panel=_RUN)
    ] = "8:64",
    load: Annotated[
        float, typer.Option(help="Request rate, as a share of the machine's throughput.", rich_help_panel=_RUN)
    ] = 0.7,
    seed: Annotated[int, typer.Option(help="The same seed gives the same requests.", rich_help_panel=_RUN)] = 0,
) -> BenchResult:
    """Measure what steps cost on this machine, for chairlift simulate --profile.

    With --record, the error of the simulator is measured as well; chairlift
    simulate --against FILE repeats that comparison without a model.
    """
    from chairlift.config import EngineConfig
    from chairlift.engine.startup import load_engine
    from chairlift_lab.bench.profile.run import measure_profile
    from chairlift_lab.common.cpu_time import OtherPrograms
    from chairlift_lab.common.workload import LengthRange
    from chairlift_lab.planning.recording import RunRecorder, RunSettings, compare

    if rounds < 1:
        raise InvalidParameter("rounds", f"must be at least 1, got {rounds}")
    if not record:
        refuse_given(context, _OPTIONS_OF_THE_RUN, "only goes with --record")
    elif given(context, "max_delay_ms"):
        raise InvalidParameter("max_delay_ms", "cannot be simulated; only the policy's default can")
    refuse_given(context, ("budget", "target_tpot_ms", "target_ttft_ms"), "a profile needs steps of all sizes")
    settings = RunSettings(
        requests=requests,
        prompt_len=LengthRange.parse("prompt_len", prompt_len),
        output_len=LengthRange.parse("output_len", output_len),
        load=load,
        seed=seed,
    )
    check_writable(out, parameter="out")
    config = EngineConfig(**engine.config())
    note("loading")
    started = load_engine(engine.model, config, progress=not engine.quiet).engine
    replica = _replica(started, config)
    others, run = OtherPrograms(), None
    if record:
        note("estimating the throughput of the machine")
        recorder = RunRecorder(started, replica, measure_profile(started, rounds=1, note=note).cost, settings)
        profile = measure_profile(started, rounds=rounds, note=note, seed=1, between=recorder.keep_up)
        run = recorder.recorded(profile.cost)
    else:
        profile = measure_profile(started, rounds=rounds, note=note)
    disturbance = others.share()
    saved = profile.to_json() | {"settings": _settings(engine.model, replica), "machine": machine()}
    saved["other_programs"] = disturbance  # their share of all processor time meanwhile
    if run is not None:
        saved["run"] = run.to_json()
    out.write_text(json.dumps(saved) + "\n", encoding="utf-8")
    compared = [] if run is None else [comparison_table(compare(run))]
    return BenchResult({}, [], [_prices(profile, disturbance), *compared, Line(f"Written to {out}")])


def _settings(model: str, replica: ReplicaSettings) -> dict[str, Any]:
    return {
        "model": model,
        "kv_blocks": replica.num_blocks,
        "max_batch_requests": replica.seats,
        "max_batch_tokens": replica.max_batch_tokens,
    }


def _replica(engine: Engine, config: EngineConfig) -> ReplicaSettings:
    """A simulated engine that schedules as this one does."""
    from chairlift.engine.settings import resolve_machine
    from chairlift_lab.planning.run import ReplicaSettings

    scheduler = engine.scheduler
    return ReplicaSettings(
        num_blocks=scheduler.kv.num_blocks,
        block_size=scheduler.kv.block_size,
        seats=scheduler.max_batch_requests,
        max_batch_tokens=resolve_machine(config).max_batch_tokens,
        max_prefill_tokens=config.max_prefill_tokens,
        policy=config.policy,
        order=config.order,
    )


def _prices(profile: CostProfile, disturbance: float | None) -> Table:
    cost = profile.cost
    meanwhile = "" if disturbance is None else f"; other programs used {disturbance:.1%} of the processors meanwhile"
    rows = [("step", cost.step), ("request", cost.request)]
    rows += [(f"token, after the first {bend}" if bend else "first token", price) for bend, price in cost.tokens]
    rows += [("position read by a prompt", cost.prefill_kv), ("position read by a decode", cost.decode_kv)]
    columns = [Column("", lambda row: row[0]), Column("", lambda row: row[1], ",.3f", factor=1e6)]
    caption = f"{len(profile.steps):,} steps; typical error {profile.error:.1%}{meanwhile}"
    return Table("Microseconds per", columns, rows, caption)
