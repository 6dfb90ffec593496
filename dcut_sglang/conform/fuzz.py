"""Random requests of every kind, arriving and leaving at random, under random decisions.

The DCUT server is told to draw each step's verify lengths, and for whom it drafts, at random.
Every answer must be the plain server's; an aborted one must be the beginning of it; afterwards
the counters agree with each other and every slot is free again. All is drawn from one seed.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from dcut_sglang.conform.case import Case
from dcut_sglang.conform.cases import PROMPTS
from dcut_sglang.conform.client import Answer, Client, ConformError
from dcut_sglang.conform.compare import compare, with_margin
from dcut_sglang.conform.run import Tolerances

# Feature -> (probability, sampling parameters from a random generator). No top_k 1: the temperature
# moves its log-probabilities in a batch with sampled requests, and only there.
_FEATURES: dict[str, tuple[float, Callable[[random.Random], dict[str, Any]]]] = {
    "sampled": (
        0.4,
        lambda r: {"temperature": r.choice([0.5, 0.8, 1.2]), "sampling_seed": r.randrange(1 << 20)},
    ),
    "top_p": (0.15, lambda r: {"top_p": r.choice([0.5, 0.9])}),
    "top_k": (0.15, lambda r: {"top_k": r.choice([2, 5, 40])}),
    "frequency_penalty": (0.1, lambda r: {"frequency_penalty": r.choice([-0.3, 0.4, 1.5])}),
    "presence_penalty": (0.1, lambda r: {"presence_penalty": r.choice([-0.3, 0.8])}),
    "repetition_penalty": (0.1, lambda r: {"repetition_penalty": r.choice([0.9, 1.15, 1.6])}),
    "min_new_tokens": (0.08, lambda r: {"min_new_tokens": r.randint(1, 4)}),
    "logit_bias": (0.1, lambda r: {"logit_bias": {str(r.randrange(4, 500)): r.uniform(-5, 5)}}),
    "grammar": (
        0.12,
        lambda r: r.choice(
            [
                {"regex": "[a-z =]{3,30}"},
                {"regex": "([0-9]+ ){1,12}"},
                {"json_schema": '{"type": "object", "properties": {"a": {"type": "integer"}}}'},
                {"ebnf": 'root ::= ("ko " | "na ")+ "."'},
            ]
        ),
    ),
    "stop": (0.2, lambda r: {"stop": [r.choice(["e", "ok", "ro", "|", " 4", "zone="])]}),
    "stop_regex": (0.05, lambda r: {"stop_regex": r.choice(["[aeiou] ", "[0-9]{2}"])}),
    "stop_token_ids": (0.1, lambda r: {"stop_token_ids": r.sample(range(4, 570), 30)}),
    "ignore_eos": (0.2, lambda r: {"ignore_eos": True}),
    "no_stop_trim": (0.1, lambda r: {"no_stop_trim": True}),
    "n": (0.08, lambda r: {"n": r.randint(2, 3)}),
}


@dataclass(frozen=True)
class FuzzRequest:
    """A request and its fate.

    Attributes:
        case: what is asked; its body has a ``rid``.
        arrives_s: seconds after the start at which it is sent.
        aborted_after_s: seconds after sending at which it is aborted, or None.
    """

    case: Case
    arrives_s: float
    aborted_after_s: float | None


def draw_requests(seed: int, count: int, longest: int = 96) -> list[FuzzRequest]:
    """``count`` requests; the same seed gives the same ones.

    Args:
        longest: largest ``max_new_tokens``.
    """
    draw = random.Random(seed)
    drawn, arrives_s = [], 0.0
    for index in range(count):
        params: dict[str, Any] = {
            "temperature": 0,
            "max_new_tokens": draw.choice([1, 2, draw.randint(3, 40), draw.randint(3, longest)]),
        }
        for probability, feature in _FEATURES.values():
            if draw.random() < probability:
                params.update(feature(draw))
        if "min_new_tokens" in params:
            params["min_new_tokens"] = min(params["min_new_tokens"], params["max_new_tokens"])
        if params.keys() & {"regex", "json_schema", "ebnf"}:
            # With both, plain decoding emits one token behind the grammar's end; speculation of
            # any kind ends with the grammar.
            params.pop("ignore_eos", None)
            # A grammar that has ended and a minimum that has not leave no token at all.
            params.pop("min_new_tokens", None)
        if "repetition_penalty" in params:
            # Which penalty comes first differs from process to process (docs/upstream).
            params.pop("frequency_penalty", None)
            params.pop("presence_penalty", None)
        text = PROMPTS[draw.choice(sorted(PROMPTS))]
        body: dict[str, Any] = {
            # Cut anywhere, so that prefixes are shared, pages end anywhere, and few are equal.
            "text": text[: draw.randint(1, len(text))],
            "rid": f"fuzz-{seed}-{index}",
            "sampling_params": params,
        }
        if "n" in params:
            del body["rid"]  # SGLang names several outputs itself
        if draw.random() < 0.12:
            body |= {"return_logprob": True, "top_logprobs_num": draw.choice([0, 2])}
        if draw.random() < 0.3:
            body["stream"] = True
        aborted = draw.random() < 0.12 and "n" not in params
        drawn.append(
            FuzzRequest(
                Case(f"fuzz {seed}: request {index}", "/generate", body),
                arrives_s,
                draw.choice([0.0, 0.05, draw.uniform(0, 1)]) if aborted else None,
            )
        )
        # Bursts, and pauses in which the batch drains.
        arrives_s += draw.choice([0.0, 0.0, 0.0, draw.uniform(0, 0.1), draw.uniform(0, 0.5)])
    return drawn


def send(client: Client, request: FuzzRequest) -> Answer:
    """Send a request and, at its time, its abort.

    Raises:
        ConformError: no answer.
    """
    if request.aborted_after_s is None:
        return client.send(request.case)
    timer = threading.Timer(request.aborted_after_s, client.abort, [request.case.body["rid"]])
    timer.daemon = True
    timer.start()
    try:
        return client.send(request.case)
    finally:
        timer.cancel()


@dataclass(frozen=True)
class FuzzResult:
    """What a run found.

    Attributes:
        failures: sentences; empty when all is well.
        equal: requests whose answer is the plain server's, ties included.
        aborted: requests that were cut off, with the right beginning.
        refused: requests that DCUT answered with 400 and plain decoding served.
        ties: differences at a numerical tie.
        invalid: requests that both servers refuse.
    """

    failures: tuple[str, ...]
    equal: int = 0
    aborted: int = 0
    refused: int = 0
    ties: int = 0
    invalid: int = 0


COUNTED = ("equal", "aborted", "refused", "ties", "invalid")


class Fuzzer:
    """Runs lists of requests on a DCUT server and compares with a plain one."""

    def __init__(self, dcut: Client, plain: Client, tolerances: Tolerances | None = None) -> None:
        self.dcut, self.plain = dcut, plain
        self.tolerances = tolerances or Tolerances()
        self._expected: dict[str, Answer] = {}

    def learn(self, requests: Sequence[FuzzRequest], concurrency: int = 1) -> None:
        """Ask the plain server what is not known yet, one at a time: with others beside it, the
        noise of its seeded requests is another one (docs/upstream)."""
        new = [r.case for r in requests if r.case.name not in self._expected]
        with ThreadPoolExecutor(concurrency) as pool:
            for case, answer in zip(new, pool.map(self.plain.send, new), strict=True):
                self._expected[case.name] = answer

    def run(self, requests: Sequence[FuzzRequest], seed: int) -> FuzzResult:
        """Send the requests at their times, under random decisions; compare, check invariants.

        Raises:
            ConformError: a server does not answer.
        """
        self.learn(requests)
        before = self.dcut.free_slots()
        self.dcut.force({"dcut_force_random": seed % (1 << 32), "dcut_reset_metrics": 1})
        start = time.monotonic()

        def fate(request: FuzzRequest) -> Answer | ConformError:
            time.sleep(max(0.0, start + request.arrives_s - time.monotonic()))
            try:
                return send(self.dcut, request)
            except ConformError as error:
                return error

        with ThreadPoolExecutor(len(requests)) as pool:
            answers = list(pool.map(fate, requests))
        counters = self.dcut.dcut()
        after = self.dcut.free_slots()

        failures = [] if before == after else [f"free slots were {before} and are {after}"]
        failures += [f"counters: {line}" for line in broken_invariants(counters)]
        counts = dict.fromkeys(COUNTED, 0)
        for request, answer in zip(requests, answers, strict=True):
            verdict = self._verdict(request, answer)
            if verdict in counts:
                counts[verdict] += 1
            else:
                failures.append(f"{request.case.name}: {verdict}")
        return FuzzResult(tuple(failures), **counts)

    def _verdict(self, request: FuzzRequest, answer: Answer | ConformError) -> str:
        """One of ``COUNTED``, or a sentence that says what is wrong."""
        if isinstance(answer, ConformError):
            return str(answer)
        expected = self._expected[request.case.name]
        if request.aborted_after_s is not None and _is_aborted(answer):
            return self._aborted_verdict(expected, answer)
        if answer.status == 400 and expected.status == 200:
            return "refused"
        difference = compare(expected, answer, self.tolerances.logprob)
        if difference is None:
            return "equal" if expected.status == 200 else "invalid"
        difference = with_margin(difference, request.case, self.plain)
        if difference.margin is not None and difference.margin <= self.tolerances.tie_margin:
            return "ties"
        return f"{difference}; request: {dict(request.case.body)}"

    @staticmethod
    def _aborted_verdict(expected: Answer, answer: Answer) -> str:
        if not answer.outputs or not expected.outputs:
            return "aborted"
        want, got = expected.outputs[0].ids or [], answer.outputs[0].ids or []
        if len(got) == 1 and answer.outputs[0].counts.get("prompt_tokens") == 1:
            # While it waited for its grammar: SGLang then answers a prompt of one token in its
            # place (Req.set_finish_with_abort).
            return "aborted"
        if want[: len(got)] != got:
            return f"aborted with ids {got}, which plain decoding does not begin with: {want}"
        return "aborted"

    def shrink(
        self,
        requests: Sequence[FuzzRequest],
        seed: int,
        attempts: int = 20,
        show: Callable[[str], None] = print,
    ) -> list[FuzzRequest]:
        """A shorter list that still fails: halves are left out, then quarters, and so on."""
        kept, parts = list(requests), 2
        while attempts > 0 and len(kept) > 1:
            size = -(-len(kept) // parts)
            for begin in range(0, len(kept), size):
                shorter = kept[:begin] + kept[begin + size :]
                attempts -= 1
                if shorter and self.run(shorter, seed).failures:
                    show(f"still fails with {len(shorter)} requests")
                    kept, parts = shorter, max(parts - 1, 2)
                    break
                if attempts <= 0:
                    return kept
            else:
                if parts >= len(kept):
                    break
                parts = min(2 * parts, len(kept))
        return kept


def _is_aborted(answer: Answer) -> bool:
    """A request that never began is answered with an error."""
    if answer.status != 200:
        return "abort" in answer.message.lower()
    return any(
        isinstance(output.finish, dict) and output.finish.get("type") == "abort"
        for output in answer.outputs
    )


def broken_invariants(counters: dict[str, Any]) -> list[str]:
    """What does not add up in the ``dcut`` object of ``/server_info``."""
    checks = {
        "rows_verified == rows_decided": counters["rows_verified"] == counters["rows_decided"],
        "rows_decided == drafts_kept + request_steps": counters["rows_decided"]
        == counters["drafts_kept"] + counters["request_steps"],
        "drafts_accepted <= drafts_kept <= drafts_proposed": counters["drafts_accepted"]
        <= counters["drafts_kept"]
        <= counters["drafts_proposed"],
        "keep_ratio_counts sum to steps": sum(counters["keep_ratio_counts"].values())
        == counters["steps"],
    }
    return [f"{name} does not hold" for name, holds in checks.items() if not holds]
