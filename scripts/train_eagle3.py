"""Train an EAGLE-3 draft head for a target, as a rival for its DFlash drafter.

Reads the responses and hidden states in the work folder of `scripts/train_drafter.py`, and trains
on those that are there when it starts. Repeat the same command to go on with a training that was
stopped. The last line of output is JSON.

    python scripts/train_eagle3.py --minutes 40
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from dcut_sglang.machine import fast_dtype
from dcut_sglang.training.eagle3_tool import Eagle3Run

ROOT = Path(__file__).resolve().parent.parent
STAGES = ("train", "eval", "export")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--target", type=Path, default=ROOT / ".cache/models/smollm2", help="checkpoint folder")
    add("--data", type=Path, default=ROOT / ".cache/train/smollm2", help="a drafter's work folder")
    add("--workdir", type=Path, default=ROOT / ".cache/train/smollm2-eagle3")
    add("--out", type=Path, default=ROOT / "models/smollm2-135m-eagle3")
    add("--name", default="SmolLM2-135M-Instruct", help="the target's name on the model card")
    add("--stages", type=lambda text: text.split(","), default=list(STAGES))
    add("--minutes", type=float, default=0.0, help="budget of this call; 0: none")
    add("--steps", type=int, default=0, help="training steps; 0: what fits into --minutes")
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=1)
    add("--target-layers", type=lambda text: [int(i) for i in text.split(",")], default=[1, 14, 27])
    add("--draft-vocab", type=int, default=8000, help="tokens that the head can draft")
    add("--unroll", type=int, default=6, help="drafts in a row that the head is trained for")
    add("--sequences", type=int, default=16, help="responses per step")
    add("--block-tokens", type=int, default=192, help="rows per response and step")
    add("--lr", type=float, default=4e-3)
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        default=fast_dtype(),
        help="of matrix products in training; default: %(default)s, here",
    )
    args = parser.parse_args()
    if unknown := set(args.stages) - set(STAGES):
        parser.error(f"unknown stages {sorted(unknown)}; expected some of {', '.join(STAGES)}")
    torch.set_num_threads(args.threads)
    run = Eagle3Run(args)
    if "train" in args.stages:
        run.train()
    if not {"eval", "export"} & set(args.stages):
        print(json.dumps({"ok": True}))
        return 0
    report = run.evaluate(run.folder if (run.folder / "config.json").exists() else args.out)
    if "export" in args.stages:
        run.export(report)
    print(json.dumps(report.summary()))
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
