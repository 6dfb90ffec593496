"""The training stage: steps until done or out of time, saved as it goes."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dcut_sglang.training.checkpoint import load_state, save_state
from dcut_sglang.training.drafter import Drafter
from dcut_sglang.training.eagle3 import Eagle3Head
from dcut_sglang.training.evaluate import drafter_proposer, walk
from dcut_sglang.training.files import write_text
from dcut_sglang.training.fit import FitConfig, ResumableFit
from dcut_sglang.training.prompts import OPEN_KINDS
from dcut_sglang.training.responses import Response

Log = Callable[[str], None]
Probe = Callable[[], dict[str, float]]
"""Measures the model as it is: accept lengths by name."""

SAVE_EVERY_S = 60.0
_PROGRESS_S = 15.0
_NUM_PROBED = 2


def identity_of(
    drafter: Drafter | Eagle3Head, config: FitConfig, indices: Sequence[int]
) -> dict[str, Any]:
    """Returns what must agree when a run goes on: architecture, settings and responses."""
    facts = {"drafter": drafter.config.to_json(), "fit": asdict(config), "responses": list(indices)}
    return dict(json.loads(json.dumps(facts)))


def train(
    fitter: ResumableFit,
    num_steps: int,
    state_path: Path,
    identity: dict[str, Any],
    deadline_s: float | None,
    log: Log,
    probe: Probe | None = None,
    probe_every: int = 100,
) -> float:
    """Takes the steps that are left; returns the CPU-seconds spent on training so far.

    The state is saved about once a minute and at the end. What `probe` measures goes to
    `curve.jsonl` beside the state. `deadline_s` is a time.monotonic().
    """
    cpu_s = -time.process_time()
    saved = load_state(state_path, identity)
    if saved is not None:
        fitter.load_state(saved)
        cpu_s += saved["cpu_s"]
        log(f"training: going on at step {fitter.num_done} of {num_steps}")
    begin = last_save = last_log = time.monotonic()
    first = fitter.num_done
    while fitter.num_done < num_steps and (deadline_s is None or time.monotonic() < deadline_s):
        if probe is not None and fitter.num_done % probe_every == 0:
            _note(state_path, fitter, probe(), log)
        fitter.step()
        now = time.monotonic()
        if now - last_log > _PROGRESS_S:
            last_log = now
            step_s = (now - begin) / (fitter.num_done - first)
            log(
                f"training: step {fitter.num_done} of {num_steps}, loss {fitter.average_loss:.3f} "
                f"nats, {step_s:.1f} s per step, "
                f"{(num_steps - fitter.num_done) * step_s / 60:.1f} min left"
            )
        if now - last_save > SAVE_EVERY_S:
            last_save = now
            _save(state_path, fitter, cpu_s, identity)
    _save(state_path, fitter, cpu_s, identity)
    if probe is not None and fitter.num_done == num_steps > first:
        _note(state_path, fitter, probe(), log)
    return cpu_s + time.process_time()


def _save(path: Path, fitter: ResumableFit, cpu_s: float, identity: dict[str, Any]) -> None:
    save_state(path, fitter.state() | {"cpu_s": cpu_s + time.process_time()}, identity)


def steps_within(fitter: ResumableFit, seconds: float) -> int:
    """Returns how many steps this machine takes in that time; leaves the fitter as it was."""
    before = copy.deepcopy(fitter.state())
    fitter.step()
    begin = time.monotonic()
    for _ in range(2):
        fitter.step()
    step_s = (time.monotonic() - begin) / 2
    fitter.load_state(before)
    return max(1, int(seconds / step_s))


def settled_steps(
    config: FitConfig,
    known: dict[str, Any] | None,
    num_steps: int,
    deadline_s: float | None,
    share: float,
    make_fitter: Callable[[], ResumableFit],
) -> FitConfig:
    """Returns the config with the number of steps that ends the training.

    That of the run's earlier part (`known`, its settings.json), else `num_steps`, else what this
    machine takes in a share of the time left. Raises SystemExit if nothing ends it.
    """
    if known:
        return replace(config, num_steps=known["fit"]["num_steps"])
    if num_steps:
        return config
    if deadline_s is None:
        raise SystemExit("give --minutes or --steps: one of them must end the training")
    fitter = make_fitter()
    left_s = deadline_s - time.monotonic()
    return replace(config, num_steps=steps_within(fitter, share * left_s))


def _note(state_path: Path, fitter: ResumableFit, measured: dict[str, float], log: Log) -> None:
    told = ", ".join(f"{name} {value:.3f}" for name, value in measured.items())
    log(f"training: step {fitter.num_done}, on held-out prompts: {told}")
    point = {"step": fitter.num_done, "loss": round(fitter.average_loss, 4)}
    point |= {name: round(value, 4) for name, value in measured.items()}
    path = state_path.with_name("curve.jsonl")
    before = path.read_text() if path.exists() else ""
    write_text(path, before + json.dumps(point) + "\n")


def accept_length_probe(
    drafter: Drafter,
    embed: Tensor,
    head: Tensor,
    held_out: Sequence[Response],
    kinds: Sequence[str],
) -> Probe:
    """Returns a function that replays the first of each kind with the drafter's largest block.

    It measures all of them together and, where there are any, the open ones alone; of those it
    takes twice as many, since their accept lengths lie close together.
    """
    block_size = max(drafter.config.block_sizes)
    count = {kind: _NUM_PROBED * (1 + (kind in OPEN_KINDS)) for kind in kinds}
    chosen = [i for i, kind in enumerate(kinds) if kinds[:i].count(kind) < count[kind]]
    responses = [held_out[i] for i in chosen]
    open_rows = [row for row, i in enumerate(chosen) if kinds[i] in OPEN_KINDS]

    def probe() -> dict[str, float]:
        with torch.no_grad():
            propose = drafter_proposer(drafter, embed, head, responses, block_size, is_lazy=True)
            steps = walk(responses, propose, block_size)
        measured = {"accept_length": steps.accept_length()}
        if open_rows:
            measured["open_accept_length"] = steps.accept_length(open_rows)
        return measured

    return probe
