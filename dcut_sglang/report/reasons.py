"""Why a step kept what it kept: recorded candidates, or ones recomputed from a cost table."""

from __future__ import annotations

import numpy as np

from dcut_sglang.candidates import Candidates
from dcut_sglang.replay.reproduce import draft_ms
from dcut_sglang.selector import Selector
from dcut_sglang.survival import survival as survival_of
from dcut_sglang.trace import TraceStep


def recompute(step: TraceStep, selector: Selector) -> Candidates:
    """What the selector weighs, given the step's recorded drafts.

    Confidences are taken as the drafter gave them and costs as the table has them: what the server
    had learnt of either by then is not in the trace.
    """
    import torch

    depth = selector.cost.block_size - 1
    confidence = np.zeros((step.bs, depth), np.float32)
    if step.confidence is not None:
        confidence = step.confidence
    context = float(step.contexts.mean())
    _, decision = selector.decide(
        survival_of(torch.from_numpy(confidence)),
        (confidence > 0).sum(axis=1),
        selector.cost.at(step.bs, context),
        draft_ms(step, selector.cost, context),
    )
    assert decision.candidates is not None
    return decision.candidates


def expected_and_deviation(step: TraceStep) -> tuple[float, float]:
    """Tokens that the step was expected to emit with what it kept, and their standard deviation.

    From the recorded confidences: a request's accepted drafts A among k kept have P(A >= t) = s[t],
    hence E[A] = sum of s[t] and E[A^2] = sum of (2 t - 1) s[t]; requests are independent.
    """
    if step.confidence is None:
        return float(step.bs), 0.0
    place = np.arange(1, step.confidence.shape[1] + 1)
    confidence = np.nan_to_num(step.confidence.astype(np.float64)).clip(0.0, 1.0)
    kept = place <= (step.verify_lens - 1)[:, None]
    survival = np.cumprod(confidence, axis=1) * kept
    mean = survival.sum(axis=1)
    variance = ((2 * place - 1) * survival).sum(axis=1) - mean**2
    return float(step.bs + mean.sum()), float(np.sqrt(max(variance.sum(), 0.0)))
