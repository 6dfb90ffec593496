"""Load simulator: requests arrive, wait, are served by one policy, and leave.

Prefill is not simulated: a request starts with its prompt in the KV cache. The batch size
changes from step to step, so policies run one step at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from dcut_sglang.cost import CostTable
from dcut_sglang.replay.anchors import AnchorBank
from dcut_sglang.replay.policies import Policy, View
from dcut_sglang.replay.step_cost import StepCost

IntArray = npt.NDArray[np.int64]
PromptKind = Literal["all", "easy", "hard"]


@dataclass(frozen=True)
class Load:
    """What arrives.

    Attributes:
        concurrency: most requests in the batch; more wait.
        num_requests: how many are served in all.
        arrivals_per_s: mean of a Poisson process; None: everything is there from the start.
        kind: which texts: all, or the half with the longer (easy) or shorter accept length.
        prompt_len: committed tokens at the start of a request; None: the texts' own.
        texts_per_request: texts generated one after another by a request (its length).
        seed: decides texts and arrival times.
    """

    concurrency: int
    num_requests: int
    arrivals_per_s: float | None = None
    kind: PromptKind = "all"
    prompt_len: int | None = None
    texts_per_request: int = 1
    seed: int = 0


@dataclass(frozen=True)
class LoadRow:
    """One policy under one load; times from the cost table.

    Attributes:
        tokens_per_s: emitted tokens over the time from the first arrival to the last leave.
        steady_tokens_per_s: the same over the steps whose batch held at least 85 % of
            ``concurrency``; nan without such a step.
        ms_per_token_p50, ms_per_token_p99: over requests, time in the batch per token.
        wait_ms_p50: over requests, from arrival to the first step.
        mean_bs, rows_per_step, plain_share: over steps.
    """

    policy: str
    load: Load
    steps: int
    tokens: int
    tokens_per_s: float
    steady_tokens_per_s: float
    ms_per_token_p50: float
    ms_per_token_p99: float
    wait_ms_p50: float
    mean_bs: float
    rows_per_step: float
    plain_share: float


def texts_of_kind(bank: AnchorBank, kind: PromptKind) -> IntArray:
    """Texts by their mean accepted drafts, the harder half first; int64."""
    mean_accept = np.add.reduceat(bank.accept, bank.start[:-1]) / np.diff(bank.start)
    order = np.argsort(mean_accept, kind="stable")
    half = bank.num_texts // 2
    return {"all": np.sort(order), "hard": order[:half], "easy": order[half:]}[kind]


def simulate(
    bank: AnchorBank,
    policy: Policy,
    table: CostTable,
    load: Load,
    *,
    progress: Callable[[int], None] | None = None,
) -> LoadRow:
    """Serve a load with the first variant of a policy.

    Args:
        progress: called after each step with the number of requests served so far.

    Raises:
        ValueError: block sizes of texts and costs differ, or nothing to serve.
    """
    if bank.block_size != table.block_size:
        raise ValueError(f"texts of block {bank.block_size}, costs of {table.block_size}")
    if load.num_requests < 1 or load.concurrency < 1:
        raise ValueError("num_requests and concurrency must be at least 1")
    rng = np.random.default_rng(load.seed)
    texts = rng.choice(
        texts_of_kind(bank, load.kind), size=(load.num_requests, load.texts_per_request)
    )
    arrival_ms = np.zeros(load.num_requests)
    if load.arrivals_per_s is not None:
        gaps_ms = rng.exponential(1000 / load.arrivals_per_s, load.num_requests)
        arrival_ms = np.cumsum(gaps_ms) - gaps_ms[0]
    prompt_len = (
        bank.prompt_len[texts[:, 0]]
        if load.prompt_len is None
        else np.full(load.num_requests, load.prompt_len)
    )
    start_ms, end_ms = np.zeros((2, load.num_requests))
    num_tokens = np.zeros(load.num_requests, dtype=np.int64)
    place = np.zeros(load.num_requests, dtype=np.int64)
    anchor = bank.start[texts[:, 0]]
    waiting = deque(range(load.num_requests))
    running = np.zeros(0, dtype=np.int64)
    costs: dict[int, StepCost] = {}
    now_ms = steady_ms = 0.0
    steps = plain_steps = rows = steady_tokens = batch_total = served = 0
    while waiting or len(running):
        if not len(running):
            now_ms = max(now_ms, arrival_ms[waiting[0]])
        joining: list[int] = []
        while (
            waiting
            and len(running) + len(joining) < load.concurrency
            and arrival_ms[waiting[0]] <= now_ms
        ):
            joining.append(waiting.popleft())
        start_ms[joining] = now_ms
        running = np.concatenate([running, np.array(joining, dtype=np.int64)])
        bs = len(running)
        cost = costs.setdefault(bs, StepCost(table, bs))
        at = anchor[running]
        context = np.array([(prompt_len[running] + num_tokens[running]).mean()])
        first_variant = np.zeros(1, dtype=np.int64)
        choice = policy.choose(
            View(first_variant, at[None], bank.survival[at][None], context, cost)
        )
        kept = choice.kept[0]
        emitted = np.minimum(np.minimum(kept, bank.accept[at]) + 1, bank.remaining[at])
        step_ms = float(cost.verify_each(context, kept.sum(keepdims=True))[0])
        if not choice.plain[0]:
            step_ms += float(cost.draft(context, choice.depth)[0])
        now_ms += step_ms
        steps += 1
        plain_steps += int(choice.plain[0])
        rows += bs + int(kept.sum())
        batch_total += bs
        if bs >= 0.85 * load.concurrency:
            steady_ms += step_ms
            steady_tokens += int(emitted.sum())
        num_tokens[running] += emitted
        text_done = emitted == bank.remaining[at]
        place[running] += text_done
        done = place[running] == load.texts_per_request
        upcoming = texts[running, np.minimum(place[running], load.texts_per_request - 1)]
        anchor[running] = np.where(text_done, bank.start[upcoming], at + emitted)
        end_ms[running[done]] = now_ms
        served += int(done.sum())
        running = running[~done]
        if progress is not None:
            progress(served)
    ms_per_token = (end_ms - start_ms) / num_tokens
    return LoadRow(
        policy.labels[0],
        load,
        steps,
        int(num_tokens.sum()),
        1000 * float(num_tokens.sum()) / now_ms,
        1000 * steady_tokens / steady_ms if steady_ms else float("nan"),
        float(np.percentile(ms_per_token, 50)),
        float(np.percentile(ms_per_token, 99)),
        float(np.median(start_ms - arrival_ms)),
        batch_total / steps,
        rows / steps,
        plain_steps / steps,
    )
