"""Train the tiny pair: a Llama target of about a million parameters and a DFlash drafter for it.

Everything runs on one CPU thread from synthetic text; the number of steps follows from --minutes
alone, so a seed gives the same pair however busy the machine is. The last line of output is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from dcut_sglang.training.drafter import Drafter, DrafterConfig, save
from dcut_sglang.training.evaluate import Walk, drafter_proposer, walk
from dcut_sglang.training.fit import FitConfig, fit
from dcut_sglang.training.responses import Response, collect_responses
from dcut_sglang.training.synthetic import KINDS, Document, documents
from dcut_sglang.training.tiny_target import (
    VOCAB_SIZE,
    new_target,
    save_target,
    train_target,
    train_tokenizer,
)

BLOCK_SIZES = (4, 8, 16)
TARGET_LAYER_IDS = (0, 1, 2)
# Noise is a table that the target must learn by heart, so it sees more of it. The drafter sees
# little: a drafter's training text differs from its users' text, too.
TARGET_WEIGHTS = dict.fromkeys(KINDS, 1.0) | {"noise": 2.0}
DRAFTER_WEIGHTS = dict.fromkeys(KINDS, 1.0) | {"noise": 0.4, "mixed": 0.6}
NUM_HELD_OUT = dict.fromkeys(KINDS, 13) | {"mixed": 8, "noise": 6}
# Steps and responses per minute of --minutes.
TARGET_STEPS = 80
DRAFTER_STEPS = 100
DRAFTER_RESPONSES = 96
RESPONSE_TOKENS = 224  # prompt included

MIN_ACCEPT_LENGTH = 4.0
EASY_ACCEPT_LENGTH = 9.0
HARD_ACCEPT_LENGTH = 2.0

CARD = """# The tiny pair

`target/`: a Llama of {params_target:,} parameters (4 layers, hidden 128, 4 heads, 2 KV heads of
64, {vocab_size} tokens, tied embeddings, float32). `drafter/`: a DFlash drafter for it of
{params_drafter:,} parameters (2 layers, reads target layers {target_layer_ids}, D = 16, trained
with block lengths 4 to 16, so that D = 4 and 8 work as well). `prompts.json`: {num_prompts}
held-out prompts with their kind and accept length (D = 16).

For tests: real acceptance, confidence and spread, in seconds, on a CPU. The target knows nothing
but synthetic text (`dcut_sglang/training/synthetic.py`) and imitates it imperfectly.

Made on one CPU thread in {cpu_seconds:.0f} CPU-seconds by

    python scripts/train_tiny.py --seed {seed} --minutes {minutes:g}

with torch {torch_version}. The same seed gives the same text anywhere and the same weights on the
same kind of machine; elsewhere float rounding may differ.

## Accept length

Accepted drafts + 1 per step, greedy, replayed offline on held-out prompts; prompt and response are
at most {response_tokens} tokens long. A request's value is the mean over its steps, the total the
mean over all steps, in which hard requests weigh more because they take more steps.

| | D = 16 |
|---|---:|
| all steps | {accept_length:.2f} |
{kind_rows}
| easiest request | {max_request:.2f} |
| hardest request | {min_request:.2f} |
| requests above {easy:g} / below {hard:g} | {num_easy} / {num_hard} |

All steps with D = 8: {accept_length_8:.2f}; with D = 4: {accept_length_4:.2f}.

| at least k drafts accepted, k = | {reach_keys} |
|---|{reach_rule}|
| seen | {reach_seen} |
| mean survival (product of confidences) | {reach_predicted} |

## Kinds

* `records`, `code`, `story`: templates; easy.
* `count`: a counter, which this target often loses; between easy and hard.
* `log`, `table`: easy, with two hard tokens in each line.
* `mixed`: an easy line, then ten hard tokens, and so on.
* `noise`: each syllable follows from the two before it by a fixed random table; hard.

`code`, `table`, `story` and sometimes `count` end with the end-of-text token; the others run on.
The chat template joins the contents of all messages and adds nothing but the leading BOS.
"""


@dataclass(frozen=True)
class Summary:
    """Accept lengths of a walk over the held-out prompts; `reach` maps k to P(k accepted)."""

    accept_length: float
    by_kind: dict[str, float]
    max_request: float
    min_request: float
    num_easy: int
    num_hard: int
    reach: dict[int, float]

    @property
    def ok(self) -> bool:
        return self.accept_length >= MIN_ACCEPT_LENGTH and self.num_easy > 0 and self.num_hard > 0


def held_out_documents(seed: int) -> list[Document]:
    """A fixed number of held-out documents of each kind, no prompt twice."""
    chosen: list[Document] = []
    for kind, count in NUM_HELD_OUT.items():
        seen: dict[str, Document] = {}
        for document in documents(seed, "heldout", {kind: 1.0}):
            seen.setdefault(document.prompt, document)
            if len(seen) == count:
                break
        chosen += seen.values()
    return chosen


def summarize(result: Walk, held_out: list[Document]) -> Summary:
    by_request = [result.accept_length([i]) for i in range(len(held_out))]
    kinds = [document.kind for document in held_out]
    return Summary(
        accept_length=round(result.accept_length(), 3),
        by_kind={
            kind: round(result.accept_length([i for i, k in enumerate(kinds) if k == kind]), 2)
            for kind in KINDS
        },
        max_request=round(max(by_request), 2),
        min_request=round(min(by_request), 2),
        num_easy=sum(length > EASY_ACCEPT_LENGTH for length in by_request),
        num_hard=sum(length < HARD_ACCEPT_LENGTH for length in by_request),
        reach={k: round(result.reach(k), 3) for k in (1, 2, 3, 4, 6, 8, 12, 15)},
    )


def write_prompts(path: Path, held_out: list[Document], result: Walk) -> None:
    rows = [
        json.dumps(
            {
                "kind": document.kind,
                "accept_length": round(result.accept_length([i]), 2),
                "prompt": document.prompt,
            }
        )
        for i, document in enumerate(held_out)
    ]
    path.write_text("[\n" + ",\n".join(rows) + "\n]\n")


def write_card(path: Path, summary: Summary, walks: dict[int, Walk], **facts: object) -> None:
    largest = walks[max(walks)]
    survival = largest.confidence.cumprod(1)[largest.is_whole].mean(0)
    path.write_text(
        CARD.format(
            **facts,
            **asdict(summary),
            accept_length_4=walks[4].accept_length(),
            accept_length_8=walks[8].accept_length(),
            vocab_size=VOCAB_SIZE,
            target_layer_ids=", ".join(map(str, TARGET_LAYER_IDS)),
            torch_version=torch.__version__,
            response_tokens=RESPONSE_TOKENS,
            easy=EASY_ACCEPT_LENGTH,
            hard=HARD_ACCEPT_LENGTH,
            kind_rows="\n".join(f"| {k} | {v:.2f} |" for k, v in summary.by_kind.items()),
            reach_keys=" | ".join(map(str, summary.reach)),
            reach_rule="|".join("---:" for _ in summary.reach),
            reach_seen=" | ".join(f"{v:.2f}" for v in summary.reach.values()),
            reach_predicted=" | ".join(f"{survival[k - 1].item():.2f}" for k in summary.reach),
        )
    )


def progress(message: str) -> None:
    print(f"[{time.process_time():6.1f} cpu_s] {message}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("models/tiny"))
    parser.add_argument("--minutes", type=float, default=5.0, help="budget in CPU-minutes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)

    sample = itertools.islice(documents(args.seed, "train", num_lines=4), 2000)
    tokenizer = train_tokenizer([document.prompt + document.text for document in sample])
    target = new_target(tokenizer)
    stream = documents(args.seed, "train", TARGET_WEIGHTS)
    train_target(target, tokenizer, stream, round(TARGET_STEPS * args.minutes), progress)
    target.eval()
    save_target(target, tokenizer, args.out / "target")

    def respond(chosen: list[Document]) -> list[Response]:
        prompts = [tokenizer.encode(document.prompt) for document in chosen]
        return collect_responses(
            target, prompts, TARGET_LAYER_IDS, RESPONSE_TOKENS, tokenizer.eos_token_id
        )

    # Another stream than the target's, as a drafter usually meets prompts new to its target.
    stream = documents(args.seed + 1_000_000, "train", DRAFTER_WEIGHTS)
    responses = respond(list(itertools.islice(stream, round(DRAFTER_RESPONSES * args.minutes))))
    held_out = held_out_documents(args.seed)
    held_out_responses = respond(held_out)
    num_tokens = sum(len(r.token_ids) - r.num_prompt_tokens for r in responses)
    progress(f"{len(responses)} responses, {num_tokens} tokens")

    drafter = Drafter(
        DrafterConfig(
            hidden_size=target.config.hidden_size,
            num_heads=4,
            num_kv_heads=2,
            head_dim=64,
            ffn_size=256,
            num_layers=2,
            vocab_size=VOCAB_SIZE,
            mask_token_id=tokenizer.mask_token_id,
            target_layer_ids=TARGET_LAYER_IDS,
            num_target_layers=target.config.num_hidden_layers,
            block_sizes=BLOCK_SIZES,
            max_position_embeddings=target.config.max_position_embeddings,
        )
    )
    embed = target.get_input_embeddings().weight.detach()
    head = target.get_output_embeddings().weight.detach()
    fit_config = FitConfig(num_steps=round(DRAFTER_STEPS * args.minutes), seed=args.seed)
    fit(drafter, embed, head, responses, fit_config, progress)
    save(drafter, args.out / "drafter")

    walks = {
        size: walk(
            held_out_responses,
            drafter_proposer(drafter, embed, head, held_out_responses, size),
            size,
        )
        for size in BLOCK_SIZES
    }
    summary = summarize(walks[max(BLOCK_SIZES)], held_out)
    write_prompts(args.out / "prompts.json", held_out, walks[max(BLOCK_SIZES)])
    cpu_s = time.process_time()
    facts = {
        "params_target": sum(p.numel() for p in target.parameters()),
        "params_drafter": sum(p.numel() for p in drafter.parameters()),
        "cpu_seconds": round(cpu_s, 1),
    }
    write_card(
        args.out / "README.md",
        summary,
        walks,
        num_prompts=len(held_out),
        seed=args.seed,
        minutes=args.minutes,
        **facts,
    )
    ok = summary.ok and cpu_s < 60 * args.minutes
    print(json.dumps({"ok": ok, **facts, **asdict(summary)}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
