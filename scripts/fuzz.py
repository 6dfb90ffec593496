"""`make fuzz`: random mixed requests on the tiny pair, DCUT against plain decoding."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

from dcut_sglang.bench.server import stop_on_sigterm
from dcut_sglang.conform.client import Client
from dcut_sglang.conform.fuzz import COUNTED, Fuzzer, draw_requests
from dcut_sglang.conform.pair import SMALL_ARGS, tiny_pair

LOGS = Path(__file__).resolve().parents[1] / ".cache" / "fuzz"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 1_000_000)
    parser.add_argument("--round", type=int, default=100, help="requests between two checks")
    parser.add_argument("--page-size", type=int, default=1)
    args = parser.parse_args()
    stop_on_sigterm()

    print(f"seed {args.seed}", flush=True)
    totals: Counter[str] = Counter()
    server_args = (*SMALL_ARGS, "--page-size", str(args.page_size))
    with tiny_pair(LOGS, server_args) as (dcut, plain):
        fuzzer = Fuzzer(Client(dcut.url, args.round), Client(plain.url))
        for begin in range(0, args.requests, args.round):
            seed = args.seed + begin
            requests = draw_requests(seed, min(args.round, args.requests - begin))
            start = time.monotonic()
            result = fuzzer.run(requests, seed)
            for name in COUNTED:
                totals[name] += getattr(result, name)
            elapsed_s = time.monotonic() - start
            print(f"{begin + len(requests)} requests, {elapsed_s:.0f} s: {dict(totals)}")
            if result.failures:
                print(f"\nFAILED, seed {seed}, {len(requests)} requests:")
                print("\n".join(result.failures))
                fewer = fuzzer.shrink(requests, seed)
                print(f"\n{len(fewer)} of these requests fail by themselves:")
                for request in fewer:
                    print(
                        json.dumps({**request.case.body}),
                        request.arrives_s,
                        request.aborted_after_s,
                    )
                print(
                    f"again: scripts/fuzz.py --seed {seed} --requests {len(requests)} "
                    f"--page-size {args.page_size}; logs: {LOGS}"
                )
                return 1
        retractions = dcut.log.read_text().count("Retract")
    print(f"retractions: {retractions}")
    print(json.dumps({"ok": True, "seed": args.seed, "requests": args.requests, **totals}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
