"""`make soak MINUTES=20`: mixed requests for a long time, 1 to 64 at once and back.

The tiny pair's DCUT server under random decisions. After each cycle it drains, and its free
slots must be the first ones; at the end its memory must be within 2 % of what it was after
warming up. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dcut_sglang.bench.server import stop_on_sigterm
from dcut_sglang.conform.client import Client
from dcut_sglang.conform.fuzz import broken_invariants, draw_requests, send
from dcut_sglang.conform.pair import SMALL_ARGS, tiny_server

LOGS = Path(__file__).resolve().parents[1] / ".cache" / "soak"
CONCURRENCY = (1, 2, 4, 8, 16, 32, 64, 32, 16, 8, 4, 2, 1)
CYCLE_S = 60.0
MAX_GROWTH = 0.02


def load(client: Client, concurrency: int, seconds: float, seed: int) -> int:
    """Keep ``concurrency`` requests under way for that long; how many were answered.

    Raises:
        RuntimeError: an answer is neither 200 nor a refusal nor an abort.
    """
    requests = iter(draw_requests(seed, 4000, longest=64))
    lock, deadline = threading.Lock(), time.monotonic() + seconds

    def work() -> int:
        done = 0
        while time.monotonic() < deadline:
            with lock:
                request = next(requests)
            answer = send(client, request)
            if answer.status != 200 and answer.status != 400 and "abort" not in answer.message:
                raise RuntimeError(f"{request.case.name}: {answer.status} {answer.message}")
            done += 1
        return done

    with ThreadPoolExecutor(concurrency) as pool:
        return sum(job.result() for job in [pool.submit(work) for _ in range(concurrency)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    stop_on_sigterm()

    cycles = max(3, round(args.minutes * 60 / CYCLE_S))
    memory_mb: list[float] = []
    answered, problems = 0, []
    with tiny_server("DCUT", LOGS / "dcut.log", SMALL_ARGS) as server:
        client = Client(server.url, 80)
        first = client.free_slots()
        client.force({"dcut_force_random": args.seed})
        for cycle in range(cycles):
            start = time.monotonic()
            for step, concurrency in enumerate(CONCURRENCY):
                seed = args.seed + 100 * cycle + step
                answered += load(client, concurrency, CYCLE_S / len(CONCURRENCY), seed)
            slots = client.free_slots()
            problems += [] if slots == first else [f"cycle {cycle}: free slots {slots}, {first=}"]
            problems += [f"cycle {cycle}: {b}" for b in broken_invariants(client.dcut())]
            memory_mb.append(server.memory_mb())
            print(
                f"cycle {cycle + 1} of {cycles}: {time.monotonic() - start:.0f} s, "
                f"{answered} requests, {memory_mb[-1]:.1f} MB, free {slots}",
                flush=True,
            )
    # The first cycle warms allocators and caches up.
    third = max(1, (cycles - 1) // 3)
    begin_mb = statistics.median(memory_mb[1 : 1 + third])
    end_mb = statistics.median(memory_mb[-third:])
    growth = end_mb / begin_mb - 1
    if growth > MAX_GROWTH:
        problems.append(f"memory grew by {100 * growth:.1f} %: {begin_mb:.0f} to {end_mb:.0f} MB")
    print("\n".join(problems))
    summary = {
        "ok": not problems,
        "cycles": cycles,
        "requests": answered,
        "memory_mb": [round(begin_mb, 1), round(end_mb, 1)],
        "growth": round(growth, 4),
        "free_slots": first,
    }
    print(json.dumps(summary))
    return 0 if summary["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
