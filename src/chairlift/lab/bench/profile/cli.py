"""`chairlift bench profile`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from chairlift.errors import InvalidParameter
from chairlift.lab.bench.base import bench
from chairlift.lab.common.output import show_comparison, show_table, watch
from chairlift.lab.common.report import check_writable, machine
from chairlift.terminal.options import EngineOptions, given, refuse_given

if TYPE_CHECKING:
    from chairlift.config import EngineConfig
    from chairlift.engine.engine import Engine
    from chairlift.lab.bench.profile.run import Profile
    from chairlift.lab.simulate.run import ReplicaSettings

_RUN = "The recorded run"
_OF_THE_RUN = ("requests", "prompt_len", "output_len", "load", "seed")


@bench(
    "profile",
    "chairlift bench profile --out profile.json",
    "chairlift bench profile --model path/to/model --out profile.json",
    "chairlift simulate --profile profile.json --rate 1",
)
def bench_profile(
    context: typer.Context,
    engine: EngineOptions,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write it, as JSON.")] = Path("profile.json"),
    rounds: Annotated[int, typer.Option(help="More rounds, better figures.")] = 3,
    record: Annotated[
        bool,
        typer.Option(
            "--record",
            help="Run some traffic too, write it down beside the profile, and compare the simulator with it.",
        ),
    ] = False,
    requests: Annotated[int, typer.Option(help="How many.", rich_help_panel=_RUN)] = 100,
    prompt_len: Annotated[
        str, typer.Option(metavar="LOW:HIGH", help="Prompt tokens, log-uniform.", rich_help_panel=_RUN)
    ] = "16:256",
    output_len: Annotated[
        str, typer.Option(metavar="LOW:HIGH", help="Output tokens, log-uniform.", rich_help_panel=_RUN)
    ] = "8:64",
    load: Annotated[
        float,
        typer.Option(help="Their rate, as a share of what the machine gets done at once.", rich_help_panel=_RUN),
    ] = 0.7,
    seed: Annotated[int, typer.Option(help="The same seed gives the same requests.", rich_help_panel=_RUN)] = 0,
) -> None:
    """Learn what steps cost on this machine, for chairlift simulate --profile.

    With --record, how far the simulator is off is measured as well; chairlift
    simulate --against FILE repeats that comparison without a model.
    """
    from chairlift.config import EngineConfig
    from chairlift.engine.startup import load_engine
    from chairlift.lab.bench.profile.run import measure_profile
    from chairlift.lab.common.cpu_time import OtherPrograms
    from chairlift.lab.common.workload import LengthRange
    from chairlift.lab.simulate.recording import Recorder, RunSettings, compare

    if rounds < 1:
        raise InvalidParameter("rounds", f"must be at least 1, got {rounds}")
    if not record:
        refuse_given(context, _OF_THE_RUN, "only goes with --record")
    elif given(context, "max_delay_ms"):
        raise InvalidParameter("max_delay_ms", "the simulator knows no other than the policy's own; leave it out")
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
    with watch(enabled=not engine.quiet) as note:
        note("loading")
        started = load_engine(engine.model, config, progress=not engine.quiet).engine
        replica = _replica(started, config)
        others, run = OtherPrograms(), None
        if record:
            note("finding out how many requests the machine can take")
            recorder = Recorder(started, replica, measure_profile(started, rounds=1, note=note).cost, settings)
            profile = measure_profile(started, rounds=rounds, note=note, seed=1, between=recorder.keep_up)
            run = recorder.recorded(profile.cost)
        else:
            profile = measure_profile(started, rounds=rounds, note=note)
        disturbance = others.share()
    saved: dict[str, Any] = profile.to_json()
    saved["settings"] = {"model": engine.model, "kv_blocks": replica.num_blocks}
    saved["settings"] |= {"max_batch_requests": replica.seats, "max_batch_tokens": replica.max_batch_tokens}
    saved["machine"] = machine()
    saved["other_programs"] = disturbance  # their share of all processor time meanwhile
    if run is not None:
        saved["run"] = run.to_json()
    out.write_text(json.dumps(saved) + "\n", encoding="utf-8")
    _show_prices(profile, disturbance)
    if run is not None:
        show_comparison(compare(run))
    Console().print(f"Written to {out}", highlight=False)


def _replica(engine: Engine, config: EngineConfig) -> ReplicaSettings:
    """A simulated engine that plans as this one does."""
    from chairlift.engine.machine_defaults import batch_tokens
    from chairlift.lab.simulate.run import ReplicaSettings

    scheduler = engine.scheduler
    return ReplicaSettings(
        num_blocks=scheduler.kv.num_blocks,
        block_size=scheduler.kv.block_size,
        seats=scheduler.max_batch_requests,
        max_batch_tokens=batch_tokens(config),
        max_prefill_tokens=config.max_prefill_tokens,
        policy=config.policy,
        order=config.order,
    )


def _show_prices(profile: Profile, disturbance: float | None) -> None:
    cost = profile.cost
    meanwhile = "" if disturbance is None else f"; other programs used {disturbance:.1%} of the processors meanwhile"
    rows = [("step", cost.step), ("request", cost.request)]
    rows += [(f"token, after the first {bend}" if bend else "first token", price) for bend, price in cost.tokens]
    rows += [("position read by a prompt", cost.prefill_kv), ("position read by a decode", cost.decode_kv)]
    show_table(
        "Microseconds per",
        ["", ""],
        [[name, f"{1e6 * price:,.3f}"] for name, price in rows],
        f"{len(profile.steps):,} steps; typical error {profile.error:.1%}{meanwhile}",
    )
