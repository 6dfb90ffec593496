"""What an EAGLE-3 head accepts on held-out prompts, and its model card."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dcut_sglang.training.eagle3 import Eagle3Head
from dcut_sglang.training.eagle3_fit import head_proposer
from dcut_sglang.training.evaluate import walk
from dcut_sglang.training.report import kind_means, split_means
from dcut_sglang.training.responses import Response

# Drafts per step of the evaluation: SGLang's --speculative-num-steps.
NUM_DRAFTS = (3, 7)
# A head below this on the code kinds, at 3 drafts, is no rival for anything.
MIN_CODE = 2.0

_CARD = """# EAGLE-3 draft head for {target_name}

One layer, {num_params:.1f} million parameters, {size_mb:.1f} MB in bfloat16, in the format that
SGLang's `LlamaForCausalLMEagle3` loads. It reads the target's layers {layer_ids}, shares the
target's embedding, and drafts {draft_vocab_size} of its {vocab_size} tokens. The output layer holds
the target's own rows, frozen.

Made with this repository's `scripts/train_eagle3.py`, as a rival for DFlash drafters trained on the
same text; `training/` holds the settings and the learning curve.

| | |
|---|---|
| target | {target_name}; its fingerprint is in `config.json` |
| training text | {num_responses} greedy responses of the target, {num_tokens} tokens |
| started from | the target's layer in front of the last |
| training | {num_done} of {num_steps} planned steps, in chains of {num_unroll} drafts |
| time | {cpu_minutes:.0f} CPU-minutes on {machine} |
| licence | Apache-2.0, as the target |

To serve: `--speculative-algorithm EAGLE3 --speculative-eagle-topk 1 --speculative-num-steps 3
--speculative-num-draft-tokens 4`.

## Accept length

Accepted drafts + 1 per step, greedy, float32, chains, replayed on held-out prompts ({num_prompt}
unseen fillings of the training templates).

| kind | 3 drafts | 7 drafts |
|---|---:|---:|
{kind_rows}
| **code and structured, mean over kinds** | **{code_3:.2f}** | **{code_7:.2f}** |

| split | 3 drafts: code and structured | other | 7 drafts: code and structured | other |
|---|---:|---:|---:|---:|
{split_rows}

{verdict}
"""


@dataclass(frozen=True)
class Eagle3Report:
    """Accept lengths by drafts per step: on unseen prompts by kind, on every split by group.

    by_split[n][split] has the means over the kinds of "code" and "other", of those that are there.
    """

    by_kind: dict[int, dict[str, float]]
    by_split: dict[int, dict[str, dict[str, float]]]

    def code(self, num_drafts: int) -> float:
        """Returns the mean over the code kinds on unseen prompts."""
        return split_means(self.by_kind[num_drafts]).get("code", float("nan"))

    @property
    def ok(self) -> bool:
        return self.code(NUM_DRAFTS[0]) >= MIN_CODE

    def summary(self) -> dict[str, Any]:
        """Returns the one-line result."""
        rounded = {
            n: {kind: round(value, 2) for kind, value in kinds.items()}
            for n, kinds in self.by_kind.items()
        }
        return {
            "ok": self.ok,
            **{f"code_{n}": round(self.code(n), 3) for n in NUM_DRAFTS},
            "by_kind": rounded,
        }


@torch.no_grad()
def evaluate(
    head: Eagle3Head,
    embed: torch.Tensor,
    held_out: Sequence[Response],
    kinds: Sequence[str],
    splits: Sequence[str],
    log: Callable[[str], None] = lambda _: None,
) -> Eagle3Report:
    """Replays the held-out responses; `kinds` and `splits` name each one's."""
    by_kind: dict[int, dict[str, float]] = {}
    by_split: dict[int, dict[str, dict[str, float]]] = {}
    for num_drafts in NUM_DRAFTS:
        by_split[num_drafts] = {}
        for split in dict.fromkeys(splits):
            rows = [i for i, s in enumerate(splits) if s == split]
            responses = [held_out[i] for i in rows]
            propose = head_proposer(head, embed, responses, num_drafts)
            result = walk(responses, propose, num_drafts + 1)
            log(f"evaluation: {result.accept_length():.3f} on {split}, {num_drafts} drafts")
            means = kind_means(result, [kinds[i] for i in rows])
            by_split[num_drafts][split] = split_means(means)
            if split == "prompt":
                by_kind[num_drafts] = means
    return Eagle3Report(by_kind, by_split)


def model_card(report: Eagle3Report, head: Eagle3Head, **facts: Any) -> str:
    """Returns the card's text. `facts`: the template's fields that the two do not have."""
    few, many = NUM_DRAFTS
    few_by_kind, many_by_kind = report.by_kind[few], report.by_kind[many]
    # The target's embedding is not part of the checkpoint.
    num_params = sum(parameter.numel() for parameter in head.parameters())
    verdict = (
        f"At 3 drafts it accepts {report.code(few):.2f} tokens per step on code"
        f"{', at least' if report.ok else ': less than'} the {MIN_CODE:.1f} that make a rival."
    )
    if facts["num_done"] < facts["num_steps"]:
        verdict += (
            "\nIts training ended before the last planned step, while the learning rate was still "
            "above zero."
        )

    def cells(num_drafts: int, split: str) -> list[str]:
        means = report.by_split[num_drafts][split]
        return [f"{means[group]:.2f}" if group in means else "-" for group in ("code", "other")]

    return _CARD.format(
        **facts,
        num_params=num_params / 1e6,
        size_mb=2 * num_params / 1e6,
        layer_ids=", ".join(map(str, head.config.target_layer_ids)),
        draft_vocab_size=head.config.draft_vocab_size,
        vocab_size=head.config.vocab_size,
        num_unroll=head.config.num_unroll,
        kind_rows="\n".join(
            f"| {kind} | {few_by_kind[kind]:.2f} | {many_by_kind[kind]:.2f} |"
            for kind in sorted(few_by_kind, key=lambda kind: -few_by_kind[kind])
        ),
        code_3=report.code(few),
        code_7=report.code(many),
        split_rows="\n".join(
            f"| {split} | {' | '.join(cells(few, split) + cells(many, split))} |"
            for split in report.by_split[few]
        ),
        verdict=verdict,
    )
