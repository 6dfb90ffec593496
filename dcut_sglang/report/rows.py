"""Benchmark rows, as the commands of ``bench_results/`` write them, brought to one shape.

Three kinds of rows are read: of ``make bench`` (one per arm, load and pass), of the demo (one per
arm, with a list of waves), and of never-slower (one per load, with all arms inside). Fields that
are missing stay None; unknown ones are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dcut_sglang.report.errors import ReportError

EXPECTED = (
    'a row with "arm" and a throughput ("overall", "steady", "tokens_per_s" or '
    '"tokens_per_cpu_s"), or with throughputs by arm'
)


@dataclass(frozen=True)
class ArmRow:
    """One arm under one load.

    Attributes:
        source, line: file and line that it comes from.
        prompts: kind of prompts, or name of the data set.
        concurrency: requests in flight; None where requests arrive at ``request_rate`` per second.
        tokens_per_s, tokens_per_cpu_s: one value per wave (a single one per pass in rows of
            ``make bench``), emitted tokens per wall second and per CPU second of the scheduler.
        user_tokens_per_s: speed that one request sees; ``user_speed_from`` says how it was found.
        ttft_ms, tpot_ms: (p50, p99).
        keep_ratio: kept drafts over drafted ones.
        predicted_ms, measured_ms: means over decided steps.
        step_sample: (batch size, rows, predicted ms, measured ms) of some steps.
        by_batch_size: (batch size, steps, drafts computed, drafts kept, plain steps).
        equal_to_plain: outputs equal to plain decoding's, of so many.
    """

    source: str
    line: int
    benchmark: str
    pair: str
    commit: str
    time: str
    arm: str
    prompts: str
    concurrency: int | None
    request_rate: float | None
    tokens_per_s: list[float]
    tokens_per_cpu_s: list[float]
    user_tokens_per_s: float | None = None
    user_speed_from: str = ""
    ttft_ms: list[float] | None = None
    tpot_ms: list[float] | None = None
    accept_length: float | None = None
    rows_per_step: float | None = None
    keep_ratio: float | None = None
    plain_share: float | None = None
    predicted_ms: float | None = None
    measured_ms: float | None = None
    step_sample: list[list[float]] | None = None
    by_batch_size: list[list[float]] | None = None
    equal_to_plain: list[int] | None = None

    def to_json(self) -> dict[str, Any]:
        """Without the fields that are None."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Rows:
    """A file's rows, and the conditions that they were measured under, each set once."""

    arms: list[ArmRow]
    conditions: list[dict[str, Any]]


def read_rows(path: Path) -> Rows:
    """Read a JSONL file of rows.

    Raises:
        ReportError: a line that is no JSON object or no row, with its number and what was expected.
        OSError: the file cannot be read.
    """
    arms: list[ArmRow] = []
    conditions: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ReportError(
                f"{place}: expected one JSON object per line, got {line[:40]!r} ({error})"
            ) from error
        if not isinstance(row, dict):
            raise ReportError(f"{place}: expected a JSON object, got {type(row).__name__}")
        try:
            found = _arms_of(row, path.name, number)
        except (TypeError, AttributeError, KeyError, ValueError, IndexError) as error:
            raise ReportError(f"{place}: a field is not of the expected type: {error!r}") from error
        if not found:
            keys = ", ".join(sorted(row)[:12]) or "none"
            raise ReportError(f"{place}: expected {EXPECTED}; got an object with keys {keys}")
        arms += found
        condition = _conditions(row, path.name)
        known = conditions.setdefault(
            json.dumps(condition, sort_keys=True), condition | {"rows": 0}
        )
        known["rows"] += 1
        known["last"] = max(str(row.get("time", "")), known.get("last", ""))
    if not arms:
        raise ReportError(f"{path}: expected rows as JSON lines, got an empty file")
    return Rows(arms, list(conditions.values()))


def _arms_of(row: Mapping[str, Any], source: str, line: int) -> list[ArmRow]:
    """The row's arms; [] where it has none."""
    rates = row.get("tokens_per_cpu_s")
    if isinstance(rates, dict):
        return [
            _demo_arm({**row, "arm": arm, "tokens_per_s": []}, values, source, line)
            for arm, values in rates.items()
        ]
    if not isinstance(row.get("arm"), str):
        return []
    if isinstance(row.get("overall"), dict) or isinstance(row.get("steady"), dict):
        return [_bench_arm(row, source, line)]
    if rates or row.get("tokens_per_s"):
        return [_demo_arm(row, rates or [], source, line)]
    return []


def _common(row: Mapping[str, Any], source: str, line: int) -> dict[str, Any]:
    return {
        "source": source,
        "line": line,
        "benchmark": str(row.get("benchmark") or "unnamed"),
        "pair": str(row.get("pair") or "unknown"),
        "commit": str(row.get("commit") or "unknown"),
        "time": str(row.get("time") or ""),
        "arm": row["arm"],
        "prompts": str(row.get("data") or row.get("prompts") or "demo"),
        "concurrency": row.get("concurrency"),
        "request_rate": row.get("request_rate"),
    }


def _bench_arm(row: Mapping[str, Any], source: str, line: int) -> ArmRow:
    # The steady part where there is one: ramp and drain are another load.
    rates = row.get("steady") or row["overall"]
    tokens_per_s = _list(rates.get("tokens_per_s"))
    step_ms = row.get("step_ms") or {}
    equal = row.get("equal_to_plain")
    tpot_ms = _percentiles(row.get("tpot_ms"))
    user, origin = row.get("tokens_per_s_per_user"), "row"
    if user is None and tpot_ms:
        user, origin = 1000 / tpot_ms[0], "1000 / median ms per token"
    elif user is None:
        user, origin = _user_speed(tokens_per_s, row.get("concurrency"))
    return ArmRow(
        **_common(row, source, line),
        tokens_per_s=tokens_per_s,
        tokens_per_cpu_s=_list(rates.get("tokens_per_cpu_s")),
        user_tokens_per_s=user,
        user_speed_from=origin,
        ttft_ms=_percentiles(row.get("ttft_ms")),
        tpot_ms=tpot_ms,
        accept_length=row.get("accept_length"),
        rows_per_step=row.get("rows_per_step"),
        keep_ratio=row.get("keep_ratio"),
        plain_share=row.get("plain_share"),
        predicted_ms=step_ms.get("predicted"),
        measured_ms=step_ms.get("measured"),
        step_sample=row.get("step_sample"),
        by_batch_size=row.get("by_batch_size"),
        equal_to_plain=[equal["equal"], equal["of"]] if equal else None,
    )


def _demo_arm(row: Mapping[str, Any], cpu_rates: Any, source: str, line: int) -> ArmRow:
    # In a never-slower row the counters are DCUT's, whichever arm is asked for.
    dcut = (row.get("dcut") or {}) if row["arm"] == "dcut" else {}
    tokens_per_s = _list(row.get("tokens_per_s"))
    steps, proposed = dcut.get("steps"), dcut.get("drafts_proposed")
    decided = dcut.get("selected_steps")
    user, origin = _user_speed(tokens_per_s, row.get("concurrency"))
    return ArmRow(
        **_common(row, source, line),
        tokens_per_s=tokens_per_s,
        tokens_per_cpu_s=_list(cpu_rates),
        user_tokens_per_s=user,
        user_speed_from=origin,
        accept_length=dcut.get("accept_length"),
        rows_per_step=dcut["rows_verified"] / steps if steps else None,
        keep_ratio=dcut["drafts_kept"] / proposed if proposed else None,
        plain_share=dcut.get("plain_share"),
        predicted_ms=dcut["predicted_ms"] / decided if decided else None,
        measured_ms=dcut["selected_ms"] / decided if decided else None,
    )


def _user_speed(tokens_per_s: list[float], concurrency: int | None) -> tuple[float | None, str]:
    if not (tokens_per_s and concurrency):
        return None, ""
    return sum(tokens_per_s) / len(tokens_per_s) / concurrency, "throughput / concurrency"


def _conditions(row: Mapping[str, Any], source: str) -> dict[str, Any]:
    machine, versions = row.get("machine") or {}, row.get("versions") or {}
    load = row.get("load") or {}
    return {
        "source": source,
        "benchmark": row.get("benchmark"),
        "pair": row.get("pair"),
        "commit": row.get("commit"),
        "machine": ", ".join(
            [str(machine.get("cpu", "unknown"))]
            + ([f"{machine['cores']} cores"] if machine.get("cores") else [])
        ),
        "device": row.get("device") or "cpu",
        "dtype": row.get("dtype"),
        "threads": row.get("threads"),
        "sglang": versions.get("sglang"),
        "torch": versions.get("torch"),
        "tokens": load.get("tokens", row.get("tokens")),
        "flags": " ".join(_equal_flags(row.get("flags") or [])),
        "command": row.get("command") or "",
    }


def _equal_flags(flags: list[str]) -> list[str]:
    """Those that the arms share: all in front of the first that is about speculation."""
    for place, flag in enumerate(flags):
        if str(flag).startswith("--speculative"):
            return flags[:place]
    return flags


def _percentiles(value: Any) -> list[float] | None:
    if not isinstance(value, dict) or value.get("p50") is None:
        return None
    return [float(value["p50"]), float(value.get("p99") or value["p50"])]


def _list(value: Any) -> list[float]:
    if value is None:
        return []
    return [float(v) for v in value] if isinstance(value, list) else [float(value)]
