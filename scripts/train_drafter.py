"""Train a DFlash drafter for a target: prompts, responses, training, evaluation, export.

Every stage goes on where an earlier call left off; repeat the same command until it reports that
all is done. A target is any Llama- or Qwen3-architecture checkpoint that transformers loads. The
last line of output is JSON.

    python scripts/train_drafter.py --target .cache/models/smollm2 --minutes 60
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from dcut_sglang.machine import fast_dtype
from dcut_sglang.training.prompts import NUM_TRAIN
from dcut_sglang.training.tool import STAGES, Run

ROOT = Path(__file__).resolve().parent.parent


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--target", type=Path, default=ROOT / ".cache/models/smollm2", help="checkpoint folder")
    add("--workdir", type=Path, default=ROOT / ".cache/train/smollm2")
    add("--out", type=Path, default=ROOT / "models/smollm2-135m-dflash")
    add("--name", default="SmolLM2-135M-Instruct", help="the target's name on the model card")
    add("--stages", type=lambda text: text.split(","), default=list(STAGES))
    add("--minutes", type=float, default=0.0, help="budget of this call; 0: none")
    add("--seed", type=int, default=0)
    add("--device", default="cpu")
    add("--threads", type=int, default=1)
    add("--init", type=Path, help="start from this drafter instead of layers of the target")
    add("--layers", type=int, default=2, help="layers of the drafter")
    add("--block-sizes", type=_numbers, default=(4, 8, 16), help="anchor included; D = the largest")
    add("--target-layers", type=_numbers, help="layers whose output the drafter reads")
    add("--mask-token-id", type=int)
    add("--prompts", type=int, default=NUM_TRAIN, help="training prompts of the whole set")
    add("--max-new-tokens", type=int, default=112)
    add("--rows", type=int, default=96, help="requests decoded at a time")
    add("--steps", type=int, default=0, help="training steps; 0: what fits into --minutes")
    add("--sequences", type=int, default=16, help="responses per step")
    add("--block-tokens", type=int, default=256, help="block tokens per response and step")
    add("--lr", type=float, default=2e-3)
    add("--taught-share", type=float, default=0.5, help="of the target's distribution in a label")
    add("--open-share", type=float, default=0.75, help="open text in steps of shorter blocks")
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        default=fast_dtype(),
        help="of matrix products in training and of restored features; default: %(default)s, here",
    )
    add("--exclude", type=Path, default=ROOT / "scripts/demo_prompts.json")
    add("--seen", type=Path, help="JSON list of prompts that --init has been trained on")
    add("--texts", type=Path, help="responses.npz of an earlier run: their features are computed")
    add("--force", action="store_true", help="export even if --out holds a better drafter")
    args = parser.parse_args()
    if unknown := set(args.stages) - set(STAGES):
        parser.error(f"unknown stages {sorted(unknown)}; expected some of {', '.join(STAGES)}")
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    run = Run(args)
    if "prompts" in args.stages:
        run.prompts()
    if "responses" in args.stages:
        run.responses()
    if "train" in args.stages:
        run.train()
    if not {"eval", "export"} & set(args.stages):
        print(json.dumps({"ok": True}))
        return 0
    trained = (run.drafter_folder / "model.safetensors").exists()
    only_eval = args.stages == ["eval"]
    report = run.evaluate(args.out if only_eval or not trained else run.drafter_folder)
    summary = report.summary()
    if "export" in args.stages:
        summary["exported"] = run.export(report)
    print(json.dumps(summary))
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
