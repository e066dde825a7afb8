"""Other settings of an engine for the same traffic: read from texts, compared, and written as a config file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from chairlift.config import EngineConfig
from chairlift.core.targets import Targets
from chairlift.errors import InvalidParameter
from chairlift.options import options_of
from chairlift.terminal.tables import show_table
from chairlift_lab.load.trace_files import TraceEntry
from chairlift_lab.planning.prediction import ReplicaSettings
from chairlift_lab.simulator.outcome import RequestRecord, SimulationOutcome, attainment, latencies

# Options of an engine that a simulation knows, and their names in `ReplicaSettings` where those differ.
SIMULATED = {
    "policy": "policy",
    "order": "order",
    "budget": "budget",
    "max_batch_tokens": "max_batch_tokens",
    "max_prefill_tokens": "max_prefill_tokens",
    "max_batch_requests": "slots",
    "max_overtakes": "max_overtakes",
    "preemption": "preemption",
    "prefix_caching": "prefix_caching",
    "learn_lengths": "learn_lengths",
    "target_tpot_ms": "target_tpot_ms",
    "target_ttft_ms": "target_ttft_ms",
}
_OPTIONS = {option.name: option for option in options_of(EngineConfig) if option.name in SIMULATED}
_TRUTH = {"true": True, "false": False}

Changes = Mapping[str, Any]
"""Options of `chairlift serve` that differ, by name."""


def parse_changes(text: str, parameter: str = "what_if") -> Changes:
    """Parse "order=slack,max_batch_tokens=1024"."""
    changes: dict[str, Any] = {}
    for part in text.split(","):
        name, separator, value = (each.strip() for each in part.partition("="))
        option = _OPTIONS.get(name.replace("-", "_"))
        if not separator or option is None:
            expected = f"name=value,… with names among {', '.join(SIMULATED)}"
            raise InvalidParameter(parameter, f"must be {expected}, got {part.strip()!r:.60}")
        if option.name in changes:
            raise InvalidParameter(parameter, f"{option.name} is there twice")
        try:
            parsed = _TRUTH[value.lower()] if option.kind is bool else option.kind(value)
        except (ValueError, KeyError):
            raise InvalidParameter(parameter, f"{option.name} cannot be {value!r:.40}") from None
        option.check_value(parsed)
        changes[option.name] = parsed
    return changes


def changed(settings: ReplicaSettings, changes: Changes) -> ReplicaSettings:
    """The settings with the options that differ. A budget belongs to its order, so another order brings its own."""
    values = {SIMULATED[name]: value for name, value in changes.items()}
    if "budget" not in changes and {"order", "target_tpot_ms", "target_ttft_ms"} & changes.keys():
        values["budget"] = None
    return replace(settings, **values)


def config_file(changes: Changes, *remarks: str) -> str:
    """The settings as YAML for `chairlift serve --config`."""
    lines = [f"# {remark}" for remark in remarks]
    lines += [f"{name}: {str(value).lower() if isinstance(value, bool) else value}" for name, value in changes.items()]
    return "\n".join(lines) + "\n"


# ---- the comparison ---------------------------------------------------------------------------------------------


def measured_records(entries: Iterable[TraceEntry], simulated: Iterable[RequestRecord]) -> list[RequestRecord]:
    """What a log measured, with the classes that the same requests have in a simulation."""
    return [
        RequestRecord(
            entry.at,
            entry.n_in,
            entry.n_out,
            0,
            entry.at + entry.measured.ttft,
            entry.at + entry.measured.e2e,
            service_class=record.service_class,
        )
        for entry, record in zip(entries, simulated, strict=True)
        if entry.measured is not None
    ]


def comparison(
    measured: Sequence[RequestRecord], outcomes: Mapping[str, SimulationOutcome], targets: Targets
) -> list[dict[str, Any]]:
    """One row for each figure: as it was measured, if it was, and as predicted with each of the settings; the first
    are the present ones."""
    columns = {name: _figures(outcome.records, targets) for name, outcome in outcomes.items()}
    as_is, *others = columns
    real = _figures(measured, targets) if measured else {}
    rows = []
    for name, value in columns[as_is].items():
        row: dict[str, Any] = {"name": name, "measured": real.get(name), "as_is": value, "what_if": []}
        row["error"] = _ratio(value, real.get(name))
        for other in others:
            predicted = columns[other].get(name)
            row["what_if"].append({"settings": other, "value": predicted, "change": _ratio(predicted, value)})
        rows.append(row)
    return rows


def _figures(records: Sequence[RequestRecord], targets: Targets) -> dict[str, float]:
    figures = latencies(records)
    seconds = figures["whole run, s"]
    figures["output tokens per second"] = sum(record.n_out for record in records) / seconds if seconds else 0.0
    for name, each in attainment(records).items():
        figures[f"within {name}, %"] = 100 * each["good_share"]
    if targets.given:
        figures["within the targets, %"] = 100 * sum(record.is_good(targets) for record in records) / len(records)
    return figures


def _ratio(value: float | None, other: float | None) -> float | None:
    return None if value is None or not other else value / other - 1


def show_comparison(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows; a column that no row has is left out."""
    is_measured = any(row["measured"] is not None for row in rows)
    headings = ["", *(["Measured"] if is_measured else []), "Predicted", *(["Off by"] if is_measured else [])]
    for other in rows[0]["what_if"]:
        headings += [other["settings"], "Change"]
    table = []
    for row in rows:
        cells = [_number(row["measured"])] if is_measured else []
        cells.append(_number(row["as_is"]))
        cells += [_share(row["error"])] if is_measured else []
        for other in row["what_if"]:
            cells += [_number(other["value"]), _share(other["change"])]
        table.append([row["name"], *cells])
    show_table("The same traffic with other settings", headings, table)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1%}"
