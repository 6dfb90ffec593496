"""Streamed waves: the part with nearly all slots busy, the whole, and each request's timeline."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import requests

from dcut_sglang.bench.endpoint import Endpoint
from dcut_sglang.bench.waves import Prompt, RequestFailed, WaveResult, require_ok

# The share of the slots that must be busy for the time to count, as in the D-Cut page's tables.
STEADY_SHARE = 0.85
# Streams of one step arrive within so many seconds: what comes that soon behind the end of the
# steady part was computed in it. Without, steps of several tokens would be cut off by more.
_SAME_STEP_S = 0.01
# Its multiples, modulo 1, fill 0..1 evenly from the start.
_GOLDEN = (5**0.5 - 1) / 2


# Sends a prompt with sampling parameters; yields (text so far, completion tokens so far, notes).
Stream = Callable[[Endpoint, Prompt, dict[str, Any]], Iterator[tuple[str, int, dict[str, Any]]]]


@dataclass(frozen=True)
class Timeline:
    """One streamed answer.

    Attributes:
        text: all of it.
        num_tokens: completion tokens.
        sent_s: when the request was sent, on ``time.perf_counter``.
        chunks: (time, completion tokens so far) of every chunk that brought tokens.
        meta: the last chunk's ``meta_info``.
    """

    text: str
    num_tokens: int
    sent_s: float
    chunks: tuple[tuple[float, int], ...]
    meta: dict[str, Any] = field(default_factory=dict)

    def tokens_by(self, time_s: float) -> int:
        """Completion tokens that had come by then, on ``time.perf_counter``."""
        return max((tokens for at_s, tokens in self.chunks if at_s <= time_s), default=0)

    @property
    def ttft_ms(self) -> float:
        """From sending to the first token."""
        return (self.chunks[0][0] - self.sent_s) * 1e3

    @property
    def tpot_ms(self) -> float:
        """Mean time per token after the first chunk's; NaN where there is none."""
        (first_s, first), (last_s, last) = self.chunks[0], self.chunks[-1]
        return (last_s - first_s) * 1e3 / (last - first) if last > first else math.nan

    @property
    def itl_ms(self) -> list[float]:
        """Per token after the first chunk's, its share of the time since the chunk before."""
        gaps: list[float] = []
        for (then_s, before), (now_s, tokens) in zip(self.chunks, self.chunks[1:], strict=False):
            new = tokens - before
            gaps += [(now_s - then_s) * 1e3 / new] * new
        return gaps


@dataclass(frozen=True)
class StreamedWave(WaveResult):
    """A wave whose ``wall_s``, ``cpu_s`` and ``num_tokens`` are those of its steady part.

    Attributes:
        overall: the same for the whole wave, ramp and drain included.
        timelines: of each request, in the order of the prompts.
    """

    overall: WaveResult
    timelines: tuple[Timeline, ...]


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """p50 and p99 of the finite values; None where there are none."""
    finite = np.asarray([v for v in values if math.isfinite(v)])
    if not finite.size:
        return None
    return {f"p{q}": round(float(np.percentile(finite, q)), 3) for q in (50, 99)}


class _Clocks:
    """Wall and CPU time, and counted tokens, since the start."""

    def __init__(self, server: Endpoint) -> None:
        self._server = server
        self._cpu_start, self._start = server.scheduler_cpu_s(), time.perf_counter()

    def read(self, num_tokens: int, texts: tuple[str, ...] = ()) -> WaveResult:
        wall_s = time.perf_counter() - self._start
        return WaveResult(
            wall_s, self._server.scheduler_cpu_s() - self._cpu_start, num_tokens, texts
        )


class _Steady:
    """Reads the clocks when too few requests are left to fill the slots."""

    def __init__(self, server: Endpoint, num_requests: int, concurrency: int) -> None:
        self._left = num_requests
        self._least = max(1, math.ceil(STEADY_SHARE * concurrency))
        self._lock = threading.Lock()
        self.clocks = _Clocks(server)
        self._end: tuple[float, WaveResult] | None = None

    def finished(self) -> None:
        """A request has ended."""
        with self._lock:
            self._left -= 1
            if self._left < self._least and self._end is None:
                self._end = time.perf_counter(), self.clocks.read(0)

    def result(self, timelines: Sequence[Timeline]) -> WaveResult:
        """The steady part, once all requests have ended."""
        assert self._end is not None, "the last request to end closes the steady part"
        end_s, part = self._end
        num_tokens = sum(timeline.tokens_by(end_s + _SAME_STEP_S) for timeline in timelines)
        return replace(part, num_tokens=num_tokens)


def staggered(tokens: int, num_requests: int) -> list[int]:
    """Numbers of tokens around ``tokens``, from half of it to one and a half, evenly mixed.

    Requests of one length keep plain decoding in lockstep: all end in one step, and their
    successors' prompts are prefilled together. Service is not like that, and speculation ends
    them at different steps anyway, so that equal lengths favour plain decoding.
    """
    return [max(1, round(tokens * (0.5 + i * _GOLDEN % 1))) for i in range(num_requests)]


def run_steady_wave(
    server: Endpoint,
    prompts: Sequence[Prompt],
    concurrency: int,
    max_tokens: int | Sequence[int],
    ignore_eos: bool = False,
    stream: Stream | None = None,
) -> StreamedWave:
    """A wave of which only the time counts in which at least 85 % of the slots are busy.

    When requests run out, those that are left decode in ever smaller batches; a server that
    finishes easy requests early would be charged for that tail. Send several requests per slot.

    Args:
        max_tokens: of every request, or of each.
        stream: how requests are sent and read; SGLang's ``/generate`` if not given.

    Raises:
        RequestFailed: any status but 200, an error in a stream, or an answer without tokens.
        ValueError: not as many numbers of tokens as prompts.
    """
    stream = stream or sglang_stream
    lengths = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
    if len(lengths) != len(prompts):
        raise ValueError(f"expected {len(prompts)} numbers of tokens, got {len(lengths)}")
    sampling = [
        {"temperature": 0, "max_new_tokens": length, "ignore_eos": ignore_eos} for length in lengths
    ]
    with ThreadPoolExecutor(concurrency) as pool:
        steady = _Steady(server, len(prompts), concurrency)
        found = tuple(
            pool.map(lambda p, s: _timeline(server, p, s, steady, stream), prompts, sampling)
        )
        num_tokens = sum(timeline.num_tokens for timeline in found)
        overall = steady.clocks.read(num_tokens, tuple(timeline.text for timeline in found))
    part = steady.result(found)
    return StreamedWave(
        part.wall_s, part.cpu_s, part.num_tokens, overall.texts, overall=overall, timelines=found
    )


def _timeline(
    server: Endpoint,
    prompt: Prompt,
    sampling: dict[str, Any],
    steady: _Steady,
    stream: Stream,
) -> Timeline:
    text, known = "", 0
    meta: dict[str, Any] = {}
    chunks: list[tuple[float, int]] = []
    sent_s = time.perf_counter()
    for text, now, meta in stream(server, prompt, sampling):  # noqa: B007
        if now > known:
            chunks.append((time.perf_counter(), now))
            known = now
    if not chunks:
        raise RequestFailed(f"an answer of no tokens to a prompt of {len(prompt.ids)} tokens")
    steady.finished()
    return Timeline(text, known, sent_s, tuple(chunks), meta)


def sglang_stream(
    server: Endpoint, prompt: Prompt, sampling: dict[str, Any]
) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """A request to ``/generate``, with each chunk's ``meta_info`` as notes."""
    body: dict[str, Any] = {
        "input_ids": list(prompt.ids),
        "sampling_params": sampling,
        "stream": True,
    }
    for chunk in events(f"{server.url}/generate", body):
        yield chunk["text"], chunk["meta_info"]["completion_tokens"], chunk["meta_info"]


def events(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a streamed answer.

    Raises:
        RequestFailed: any status but 200, or an error in the stream.
    """
    with requests.post(url, json=body, stream=True, timeout=1800) as answer:
        require_ok(answer)
        for line in answer.iter_lines():
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[len(b"data: ") :])
            if "error" in chunk:
                raise RequestFailed(str(chunk["error"])[:500])
            yield chunk
