"""Two commits of this package on the same waves of plain greedy requests: what a change costs.

Both serve DCUT at once, from git worktrees of their own, with every decision forced to one keep
ratio, so that they do the same work; waves alternate. The last line of output is JSON, with
tokens per CPU-second of the scheduler process after over before, paired by wave, and its 95 %
interval; the exit status is 1 where that lies below --least.

    python scripts/compare_commits.py BEFORE AFTER --model tiny
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from dcut_sglang.bench.arms import COMMON_ARGS, PAIRS, speculative_args
from dcut_sglang.bench.progress import say
from dcut_sglang.bench.server import REPO_ROOT, Server, stop_on_sigterm
from dcut_sglang.bench.stats import paired_ratio
from dcut_sglang.bench.waves import Prompt, run_wave, warm
from dcut_sglang.machine import fast_dtype

NUM_PROMPT_TOKENS = 40


def worktree(stack: ExitStack, commit: str) -> Path:
    """A checkout of the commit, for as long as ``stack`` lasts."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "tree"
    git = ["git", "-C", str(REPO_ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(folder), commit], check=True)
    stack.callback(subprocess.run, [*git, "remove", "--force", str(folder)], check=True)
    return folder


def main() -> int:
    stop_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--model", choices=sorted(PAIRS), default="tiny")
    parser.add_argument("--requests", type=int, default=16, help="requests at once")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens per request")
    parser.add_argument("--waves", type=int, default=20, help="waves per commit")
    parser.add_argument("--keep-ratio", type=float, default=0.25)
    parser.add_argument("--least", type=float, default=0.98)
    args = parser.parse_args()
    pair = PAIRS[args.model]
    # Any text does: both commits decode the same one, in steps that are forced.
    starts = range(3, 3 + args.requests)
    prompts = [Prompt("any", ids=tuple(range(n, n + NUM_PROMPT_TOKENS))) for n in starts]
    logs = REPO_ROOT / ".cache" / "compare-commits-logs"
    logs.mkdir(parents=True, exist_ok=True)
    rates: dict[str, list[float]] = {"before": [], "after": []}
    with ExitStack() as stack:
        servers = {}
        for name, commit in (("before", args.before), ("after", args.after)):
            tree = worktree(stack, commit)
            servers[name] = Server(
                pair.target,
                [
                    *COMMON_ARGS,
                    *("--dtype", fast_dtype()),
                    *speculative_args("DCUT", pair),
                    *("--dcut-config", json.dumps({"cost_cache_dir": ""})),
                ],
                log=logs / f"{name}.log",
                env={"PYTHONPATH": f"{tree / 'dcut_sglang/host/cpu/shims'}:{tree}"},
            )
            stack.callback(servers[name].stop)
            servers[name].launch()
            servers[name].wait(timeout_s=900)
            servers[name].set_state(dcut_force_ratio=args.keep_ratio)
            warm(servers[name], prompts)
            say(f"{name} ({commit}) is up")
        for wave in range(args.waves):
            for name in ("before", "after") if wave % 2 else ("after", "before"):
                found = run_wave(servers[name], prompts, args.requests, args.tokens)
                rates[name].append(found.tokens_per_cpu_s)
            say(", ".join(f"{name} {rate[-1]:.1f}" for name, rate in rates.items()))
    ratio = paired_ratio(rates["after"], rates["before"])
    summary = {
        "ok": ratio.high >= args.least,
        "after_over_before": [round(v, 4) for v in (ratio.mean, ratio.low, ratio.high)],
        "model": args.model,
        "waves": args.waves,
    }
    print(json.dumps(summary))
    return 0 if summary["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
