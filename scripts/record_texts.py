"""Record held-out texts at every anchor from a real DCUT server, and what its steps cost.

The server drafts a whole block for every request in every step and is made to verify none of it,
so that each position of each text is an anchor once; replay can then cut a request anywhere.
Writes ``smollm2_code.npz`` and ``smollm2_chat.npz`` (code and structured kinds; open chat and
prompts outside of the training templates) and the probed cost table into the package's data.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dcut_sglang.bench.arms import PAIRS, speculative_args
from dcut_sglang.bench.held_out import HARD_KINDS, held_out_prompts
from dcut_sglang.bench.server import REPO_ROOT, Server, stop_on_sigterm
from dcut_sglang.bench.waves import Prompt
from dcut_sglang.cost import CostTable
from dcut_sglang.machine import fast_dtype
from dcut_sglang.replay.anchors import AnchorBank
from dcut_sglang.trace import read_trace

# Notes are open text too, but of templates: they go with the code and structured kinds.
OPEN_KINDS = tuple(kind for kind in HARD_KINDS if kind != "note")
MAX_RUNNING = 32


def record(server: Server, prompts: list[Prompt], max_tokens: int) -> None:
    """Decode every prompt greedily, its kind in the request's id."""

    def one(numbered: tuple[int, Prompt]) -> None:
        index, prompt = numbered
        sampling = {"temperature": 0, "max_new_tokens": max_tokens}
        rid = f"{'open' if prompt.kind in OPEN_KINDS else 'code'}/{prompt.kind}/{index}"
        answer = server.generate(input_ids=list(prompt.ids), sampling_params=sampling, rid=rid)
        answer.raise_for_status()

    with ThreadPoolExecutor(MAX_RUNNING) as pool:
        list(pool.map(one, enumerate(prompts)))


def main() -> int:
    """Run the server, record, convert."""
    stop_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--tokens", type=int, default=112, help="new tokens per request")
    parser.add_argument("--prompts", type=int, help="fewer prompts, for a trial")
    parser.add_argument("--probe-budget-s", type=float, default=120.0)
    parser.add_argument("--out", type=Path, default=REPO_ROOT / "dcut_sglang" / "data")
    args = parser.parse_args()
    pair, dtype, begun = PAIRS["smollm2"], fast_dtype(), time.monotonic()
    logs = REPO_ROOT / ".cache" / "record-logs"
    logs.mkdir(parents=True, exist_ok=True)
    path = logs / "every_anchor.trace"
    path.unlink(missing_ok=True)
    settings = {
        "cost_cache_dir": "",
        "probe_budget_s": args.probe_budget_s,
        "trace_path": str(path),
        "trace_tokens": True,
    }
    flags = ["--dtype", dtype, "--max-running-requests", str(MAX_RUNNING)]
    flags += ["--max-total-tokens", "16384", *speculative_args("DCUT", pair)]
    flags += ["--dcut-config", json.dumps(settings)]
    prompts = held_out_prompts()[: args.prompts]
    with Server(pair.target, flags, log=logs / "dcut.log") as server:
        table = CostTable.from_json(server.dcut()["cost_table"])
        server.set_state(dcut_verify_len_0=1)
        record(server, prompts, args.tokens)
    trace = read_trace(path)
    args.out.mkdir(parents=True, exist_ok=True)
    for group, name in (("code", "smollm2_code.npz"), ("open", "smollm2_chat.npz")):
        bank = AnchorBank.from_every_anchor(trace, lambda rid, g=group: rid.startswith(g))
        bank.save(args.out / name)
        print(
            f"{name}: {bank.num_texts} texts, {len(bank.accept)} anchors, "
            f"{bank.accept.mean():.2f} drafts accepted per anchor"
        )
    table.save(args.out / "smollm2_cpu_costs.json")
    print(f"{time.monotonic() - begun:.0f} s; costs measured in {dtype}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
