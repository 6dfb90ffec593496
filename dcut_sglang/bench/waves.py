"""Waves of requests against one server: what a wave cost and what came back.

A wave keeps ``concurrency`` requests in flight until all of its prompts are answered. Prompts
are sent once before, with one token each, so that a wave finds them in the prefix cache and
measures decoding.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import requests

from dcut_sglang.bench.endpoint import Endpoint


@dataclass(frozen=True)
class Prompt:
    """A held-out prompt and the kind it belongs to: text for the chat API, or token ids."""

    kind: str
    text: str = ""
    ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class WaveResult:
    """One wave on one server.

    Attributes:
        wall_s: from the first request sent to the last answer.
        cpu_s: CPU seconds of the scheduler process in that time.
        num_tokens: completion tokens of all requests.
        texts: answers in order of the prompts.
    """

    wall_s: float
    cpu_s: float
    num_tokens: int
    texts: tuple[str, ...]

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.wall_s

    @property
    def tokens_per_cpu_s(self) -> float:
        return self.num_tokens / self.cpu_s


class RequestFailed(RuntimeError):
    """A request was answered with an error; carries the server's words."""


@dataclass(frozen=True)
class Answer:
    """Text and length of one greedy answer."""

    text: str
    num_tokens: int


def ask(server: Endpoint, prompt: Prompt, max_tokens: int) -> Answer:
    """One greedy request: token ids through ``/generate``, text through the chat API.

    Raises:
        RequestFailed: any status but 200.
    """
    if prompt.ids:
        sampling = {"temperature": 0, "max_new_tokens": max_tokens}
        found = _json(server.generate(input_ids=list(prompt.ids), sampling_params=sampling))
        return Answer(found["text"], found["meta_info"]["completion_tokens"])
    answer = requests.post(
        f"{server.url}/v1/chat/completions",
        json={
            "model": "default",
            "messages": [{"role": "user", "content": prompt.text}],
            "temperature": 0,
            "max_tokens": max_tokens,
        },
        timeout=1800,
    )
    found = _json(answer)
    return Answer(found["choices"][0]["message"]["content"], found["usage"]["completion_tokens"])


def _json(answer: requests.Response) -> Any:
    require_ok(answer)
    return answer.json()


def require_ok(answer: requests.Response) -> None:
    """Raises RequestFailed for any status but 200."""
    if answer.status_code != 200:
        raise RequestFailed(f"HTTP {answer.status_code}: {answer.text[:500]}")


def warm(server: Endpoint, prompts: Sequence[Prompt]) -> None:
    """Bring the prompts into the server's prefix cache."""
    with ThreadPoolExecutor(max(1, len(prompts))) as pool:
        list(pool.map(lambda prompt: ask(server, prompt, 1), prompts))


def run_wave(
    server: Endpoint, prompts: Sequence[Prompt], concurrency: int, max_tokens: int
) -> WaveResult:
    """Send the prompts, ``concurrency`` at a time, and wait for the answers."""
    with ThreadPoolExecutor(concurrency) as pool:
        cpu_start, start = server.scheduler_cpu_s(), time.perf_counter()
        answers = list(pool.map(lambda prompt: ask(server, prompt, max_tokens), prompts))
        wall_s = time.perf_counter() - start
        cpu_s = server.scheduler_cpu_s() - cpu_start
    return WaveResult(
        wall_s=wall_s,
        cpu_s=cpu_s,
        num_tokens=sum(answer.num_tokens for answer in answers),
        texts=tuple(answer.text for answer in answers),
    )
