"""Run the cases on both servers, under each forced choice, alone and mixed in one batch."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

from dcut_sglang.conform.case import Case
from dcut_sglang.conform.client import Answer, Client, ConformError
from dcut_sglang.conform.compare import Difference, compare, with_margin

# What DCUT is told to do, by its run-time knobs (dcut_sglang/force.py).
CHOICES: dict[str, dict[str, float]] = {
    "auto": {"dcut_force_ratio": -1},
    "0.25": {"dcut_force_ratio": 0.25},
    "0.5": {"dcut_force_ratio": 0.5},
    "1.0": {"dcut_force_ratio": 1.0},
    "plain": {"dcut_force_plain": 1},
}
MIN_EQUAL_SHARE = 0.95

Verdict = Literal["equal", "tie", "unstable", "refused", "different"]


@dataclass(frozen=True)
class Tolerances:
    """What counts as equal.

    Attributes:
        tie_margin: two tokens whose log-probabilities are this close may change places.
        logprob: how far reported log-probabilities may be apart.
    """

    tie_margin: float = 1e-4
    logprob: float = 1e-3


@dataclass
class CaseReport:
    """A case's worst verdict over all runs, and what led to it."""

    case: Case
    runs: int = 0
    refusal: str = ""
    ties: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    unstable: str = ""

    @property
    def verdict(self) -> Verdict:
        if self.refusal:
            return "refused"
        if self.differences:
            return "unstable" if self.unstable else "different"
        return "tie" if self.ties else "equal"


def run_conformance(
    dcut: Client,
    plain: Client,
    cases: Sequence[Case],
    *,
    concurrency: int = 16,
    tolerances: Tolerances | None = None,
    show: Callable[[str], None] = print,
) -> dict[str, object]:
    """Compare, print what was found, and return the summary.

    The reference is the plain server, one request at a time. It also answers everything mixed
    once: where it then differs from itself by more than a tie, the case cannot tell anything
    about DCUT and is reported as unstable.

    Args:
        concurrency: requests under way at once in the mixed runs.

    Returns:
        ``{"ok", "cases", "equal", "refused", "differences"}``; ties count as equal, since either
        token is right.

    Raises:
        ConformError: a server does not answer, or ``dcut`` runs something else.
    """
    tolerances = tolerances or Tolerances()
    _check_servers(dcut, plain, show)
    runner = _Runner(dcut, plain, cases, concurrency, tolerances, show)
    try:
        runner.run()
    finally:
        dcut.force(CHOICES["auto"])
    return _summarize(runner.reports, runner.expected, show)


def _check_servers(dcut: Client, plain: Client, show: Callable[[str], None]) -> None:
    state, info = dcut.dcut(), plain.server_info()
    if "dcut" in (info.get("internal_states") or [{}])[0]:
        raise ConformError(
            f"{plain.url} runs DCUT too: --against needs a server without speculation, or DCUT "
            "would be compared with itself"
        )
    show(f"{dcut.url}: DCUT {state['version']}, D = {state['block_size']}, {dcut.model()}")
    show(f"{plain.url}: {plain.model()}")
    if info.get("speculative_algorithm"):
        show(f"note: {plain.url} runs {info['speculative_algorithm']}, which may err itself")
    if not info.get("disable_overlap_schedule"):
        show(
            "note: SGLang's penalties lag a token behind without speculation and with overlap: "
            "start the plain server with --disable-overlap-schedule"
        )
    for client, its in ((dcut, dcut.server_info()), (plain, info)):
        if not its.get("enable_deterministic_inference"):
            show(
                f"note: {client.url} does not honour seeds, so that sampled cases cannot be "
                "equal: start it with --enable-deterministic-inference"
            )


class _Runner:
    def __init__(
        self,
        dcut: Client,
        plain: Client,
        cases: Sequence[Case],
        concurrency: int,
        tolerances: Tolerances,
        show: Callable[[str], None],
    ) -> None:
        self.dcut, self.plain, self.cases = dcut, plain, list(cases)
        self.concurrency, self.tolerances, self.show = concurrency, tolerances, show
        self.reports = {case.name: CaseReport(case) for case in cases}
        self.expected: dict[str, Answer] = {}

    def run(self) -> None:
        self.expected = self._answers(self.plain, 1)
        mixed = self._answers(self.plain, self.concurrency, seed=0)
        for case in self.cases:
            difference = self._difference(case, mixed[case.name])
            if difference is not None and not self._is_tie(difference):
                self.reports[case.name].unstable = str(difference)
        for seed, (choice, knobs) in enumerate(CHOICES.items(), start=1):
            self.dcut.force(knobs)
            for concurrency in (1, self.concurrency):
                start = time.monotonic()
                answers = self._answers(self.dcut, concurrency, seed)
                label = f"{choice}, {'alone' if concurrency == 1 else 'mixed'}"
                for case in self.cases:
                    self._judge(label, case, answers[case.name])
                self.show(f"  {label}: {time.monotonic() - start:.0f} s")

    def _answers(self, client: Client, concurrency: int, seed: int = 0) -> dict[str, Answer]:
        """Answers by case name; mixed runs send the cases in another order each time."""
        order = list(self.cases)
        if concurrency > 1:
            random.Random(seed).shuffle(order)
        with ThreadPoolExecutor(concurrency) as pool:
            answers = pool.map(client.send, order)
            return {case.name: answer for case, answer in zip(order, answers, strict=True)}

    def _judge(self, label: str, case: Case, answer: Answer) -> None:
        report = self.reports[case.name]
        report.runs += 1
        if answer.status == 400 and self.expected[case.name].status == 200:
            report.refusal = answer.message
            return
        difference = self._difference(case, answer)
        if difference is not None:
            found = report.ties if self._is_tie(difference) else report.differences
            found.append(f"{label}: {difference}")

    def _difference(self, case: Case, answer: Answer) -> Difference | None:
        difference = compare(self.expected[case.name], answer, self.tolerances.logprob)
        return None if difference is None else with_margin(difference, case, self.plain)

    def _is_tie(self, difference: Difference) -> bool:
        return difference.margin is not None and difference.margin <= self.tolerances.tie_margin


def _show_messages(title: str, messages: dict[str, str], show: Callable[[str], None]) -> None:
    """Case names by the server's message."""
    by_message: dict[str, list[str]] = {}
    for name, message in messages.items():
        by_message.setdefault(message, []).append(name)
    for message, names in by_message.items():
        show(f"\n{title}: {'; '.join(names)}\n  {message[:300]}")


def _summarize(
    reports: dict[str, CaseReport], expected: dict[str, Answer], show: Callable[[str], None]
) -> dict[str, object]:
    groups: dict[str, Counter[Verdict]] = {}
    for report in reports.values():
        groups.setdefault(report.case.group, Counter())[report.verdict] += 1
    columns: tuple[Verdict, ...] = ("equal", "tie", "unstable", "refused", "different")
    show(f"\n{'':20} {'cases':>9} " + " ".join(f"{column:>9}" for column in columns))
    for group, counts in groups.items():
        cells = " ".join(f"{counts[column] or '-':>9}" for column in columns)
        show(f"{group:20} {counts.total():9d} {cells}")
    total = sum(groups.values(), Counter[Verdict]())
    cells = " ".join(f"{total[column] or '-':>9}" for column in columns)
    show(f"{'all':20} {total.total():9d} {cells}")

    _show_messages(
        "refused by both", {n: a.message for n, a in expected.items() if a.message}, show
    )
    _show_messages("refused", {n: r.refusal for n, r in reports.items() if r.refusal}, show)
    for report in reports.values():
        if report.verdict not in ("equal", "refused"):
            show(f"\n{report.case.name}: {report.verdict}")
            if report.unstable and report.differences:
                show(f"  plain differs from itself: {report.unstable}")
            for line in (*report.ties, *report.differences):
                show(f"  {line}")

    equal = total["equal"] + total["tie"]
    return {
        "ok": total["different"] == 0 and equal >= MIN_EQUAL_SHARE * total.total(),
        "cases": total.total(),
        "equal": equal,
        "refused": total["refused"],
        "differences": total["different"],
    }


def print_summary(summary: dict[str, object]) -> int:
    """The last line, JSON; returns the exit code."""
    print(json.dumps(summary), flush=True)
    return 0 if summary["ok"] else 1
