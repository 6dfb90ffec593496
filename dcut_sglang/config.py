"""DCUT's configuration: one JSON object, inline or in a file."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

Objective = Literal["throughput", "paper"]
OBJECTIVES: tuple[str, ...] = get_args(Objective)


class ConfigError(ValueError):
    """A configuration that cannot be used, with what was expected."""


@dataclass(frozen=True)
class DCutConfig:
    """Everything that can be set about DCUT.

    Attributes:
        keep_ratios: the buckets: shares of the batch's drafts that a step may keep. Empty: every
            number of drafts is a candidate.
        objective: ``throughput`` weighs expected tokens with the anchors counted, per measured
            millisecond; ``paper`` leaves the anchors out of the numerator.
        plain_steps: whether a step may draft nothing, where plain decoding is expected to yield
            more tokens per millisecond.
        plain_step_ms: milliseconds that a step may take which drafts nothing and makes several
            decode passes in a row, where no request needs SGLang in between; each but the first
            saves what a step costs beside its forward. 0: one pass.
        draft_subsets: whether a step may draft for some of its requests only.
        head_stages: how many drafts of a request the draft head may stop after, ascending, where
            the decision is free of a device sync (CPU). Empty: whole blocks.
        short_blocks: whether a step may draft shorter blocks, of the sizes that the drafter's
            checkpoint lists.
        short_vocabulary: whether only the tokens that the drafter's checkpoint lists
            (``dflash_config.draft_vocabulary``) are drafted, by a head of their rows alone.
        min_gain: tokens per request that drafting must be expected to add to a step, beyond its
            price, before the step drafts at all.
        max_token_ms: a cap on the predicted time per token of the slowest request of a step: a
            step drafts and keeps no more than this allows. None: no cap.
        min_drafts: drafts that are kept at least of every request that is drafted for.
        calibration: whether confidences are calibrated online from verified outcomes.
        cost_correction: whether measured step times correct the probed costs.
        deterministic: decisions depend on nothing measured or learnt while serving from outcomes
            or clocks: no calibration, no cost correction, whatever the two above say.
        probe_budget_s: seconds the cost probe may take at server start.
        probe_contexts: mean context lengths at which costs are measured.
        cost_table: a cost table file to use instead of probing; refused unless it was measured
            under the same conditions.
        trace_path: file for a decision trace, for ``dcut replay``; must not exist. None: no trace.
        trace_tokens: whether the trace holds tokens too, for every-anchor recordings.
        trace_max_mb: the trace stops growing there.
        cost_cache_dir: where probed tables are kept for the next start; empty: nowhere.
        cpu_overlap: whether SGLang's overlap scheduling stays as the command line has it on a CPU.
            There it hides nothing, since a forward runs on the scheduler's own thread, and each
            request takes a step behind its end; so it is turned off otherwise.
    """

    keep_ratios: tuple[float, ...] = ()
    objective: Objective = "throughput"
    plain_steps: bool = True
    plain_step_ms: float = 120.0
    draft_subsets: bool = True
    head_stages: tuple[int, ...] = (2, 5, 9)
    short_blocks: bool = True
    short_vocabulary: bool = True
    min_gain: float = 0.05
    max_token_ms: float | None = None
    min_drafts: int = 0
    calibration: bool = True
    cost_correction: bool = True
    deterministic: bool = False
    probe_budget_s: float = 30.0
    probe_contexts: tuple[int, ...] = (64, 512)
    cost_table: str | None = None
    cost_cache_dir: str = "~/.cache/dcut_sglang"
    trace_path: str | None = None
    trace_tokens: bool = False
    trace_max_mb: float = 64.0
    cpu_overlap: bool = False

    def __post_init__(self) -> None:
        for name in ("keep_ratios", "head_stages", "probe_contexts"):
            _require(isinstance(getattr(self, name), tuple), name, "a tuple", getattr(self, name))
        _require(
            all(_is_number(r) and 0 <= r <= 1 for r in self.keep_ratios)
            and len(set(self.keep_ratios)) == len(self.keep_ratios),
            "keep_ratios",
            "a list of different numbers in 0..1 (empty: every number of drafts)",
            self.keep_ratios,
        )
        _require(self.objective in OBJECTIVES, "objective", f"one of {OBJECTIVES}", self.objective)
        for name in (
            "plain_steps",
            "draft_subsets",
            "short_blocks",
            "short_vocabulary",
            "calibration",
            "cost_correction",
            "deterministic",
            "trace_tokens",
            "cpu_overlap",
        ):
            value = getattr(self, name)
            _require(type(value) is bool, name, "true or false", value)
        _require(
            all(type(n) is int and n > 0 for n in self.head_stages)
            and list(self.head_stages) == sorted(set(self.head_stages)),
            "head_stages",
            "ascending numbers of drafts > 0 (empty: whole blocks)",
            self.head_stages,
        )
        _require(
            _is_number(self.min_gain) and 0 <= self.min_gain < 1,
            "min_gain",
            "a number in 0..1",
            self.min_gain,
        )
        _require(
            self.max_token_ms is None
            or (_is_number(self.max_token_ms) and 0 < self.max_token_ms < math.inf),
            "max_token_ms",
            "a number of milliseconds > 0 (null: no cap)",
            self.max_token_ms,
        )
        _require(
            type(self.min_drafts) is int and self.min_drafts >= 0,
            "min_drafts",
            "a whole number >= 0",
            self.min_drafts,
        )
        _require(
            _is_number(self.plain_step_ms) and 0 <= self.plain_step_ms < math.inf,
            "plain_step_ms",
            "a number of milliseconds >= 0",
            self.plain_step_ms,
        )
        _require(
            _is_number(self.probe_budget_s) and 0 < self.probe_budget_s < math.inf,
            "probe_budget_s",
            "a number of seconds > 0",
            self.probe_budget_s,
        )
        _require(
            len(self.probe_contexts) >= 2
            and all(type(n) is int and n > 0 for n in self.probe_contexts)
            and list(self.probe_contexts) == sorted(set(self.probe_contexts)),
            "probe_contexts",
            "at least two ascending numbers of tokens",
            self.probe_contexts,
        )
        _require(
            _is_number(self.trace_max_mb) and 0 < self.trace_max_mb < math.inf,
            "trace_max_mb",
            "a number of megabytes > 0",
            self.trace_max_mb,
        )
        for name in ("cost_table", "trace_path"):
            value = getattr(self, name)
            _require(
                value is None or (isinstance(value, str) and value != ""), name, "a path", value
            )
        _require(
            isinstance(self.cost_cache_dir, str),
            "cost_cache_dir",
            "a path (empty: none)",
            self.cost_cache_dir,
        )

    @classmethod
    def from_dict(cls, data: Any) -> DCutConfig:
        """Read a JSON object.

        Raises:
            ConfigError: not an object, unknown keys (with the known ones), or bad values.
        """
        if not isinstance(data, dict):
            raise ConfigError(f"the DCUT configuration must be a JSON object, got {data!r}")
        known = [f.name for f in fields(cls)]
        unknown = sorted(set(data) - set(known))
        if unknown:
            raise ConfigError(
                f"unknown DCUT setting {', '.join(unknown)}; known: {', '.join(known)}"
            )
        for name in ("keep_ratios", "head_stages", "probe_contexts"):
            if name in data and not isinstance(data[name], list):
                raise ConfigError(f"{name} must be a list, got {data[name]!r}")
        values: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in data.items()
        }
        return cls(**values)

    @classmethod
    def parse(cls, text: str | None) -> DCutConfig:
        """Read the command-line form: inline JSON, or the path of a JSON file; None: defaults.

        Raises:
            ConfigError: it is neither, or the values are bad.
        """
        if text is None or not text.strip():
            return cls()
        where = "--dcut-config"
        if not text.lstrip().startswith(("{", "[", '"')):
            where = text
            try:
                text = Path(text).expanduser().read_text()
            # A path can also be no path at all (NUL), not text, or an unknown ~user.
            except (OSError, ValueError, RuntimeError) as error:
                raise ConfigError(
                    f"--dcut-config takes a JSON object or the path of a JSON file: {error}"
                ) from error
        try:
            return cls.from_dict(json.loads(text))
        except json.JSONDecodeError as error:
            raise ConfigError(f"{where} is not valid JSON: {error}") from error
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """The effective values, as ``from_dict`` reads them."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require(holds: bool, name: str, expected: str, found: Any) -> None:
    if not holds:
        raise ConfigError(f"{name} must be {expected}, got {found!r}")


# Settings of DCUT without one of its additions at a time, by what it then does.
WITHOUT: dict[str, dict[str, Any]] = {
    "whole blocks": {"head_stages": ()},
    "all or none": {"draft_subsets": False},
    "long blocks": {"short_blocks": False},
    "always drafts": {"plain_steps": False},
    "four ratios": {"keep_ratios": (0.25, 0.5, 0.75, 1.0)},
    "uncalibrated": {"calibration": False},
    "whole vocabulary": {"short_vocabulary": False},
}
