"""The model card of a drafter, written from its evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dcut_sglang.training.report import Report

_CARD = """# DFlash drafter for {target_name}

{num_layers} layers, {num_params:.1f} million parameters, {size_mb:.1f} MB in bfloat16, D = {d}, in
the format that SGLang's `DFlashDraftModel` loads. It reads the target's layers {layer_ids} and
shares its embedding and head. It was trained with block lengths {shortest} to {d}.

Made with this repository's `scripts/train_drafter.py`; `training/` holds the configuration, the
learning curve and the responses (token ids) it was trained and measured on.

| | |
|---|---|
| target | {target_name}; its fingerprint is in `config.json` |
| training text | {num_train} greedy responses of the target, {num_tokens} tokens |
| started from | {init} |
| training | {num_steps} steps, {cpu_minutes:.0f} CPU-minutes on {machine} |
| licence | Apache-2.0, as the target |

## Accept length

Accepted drafts + 1 per step, greedy, float32, D = {d}, replayed on held-out prompts: unseen
fillings of the training templates ({num_prompt} prompts), topics whose words no training prompt
contains, and prompts outside of all templates. The 4-gram model (longest match, most frequent
continuation) has seen the drafter's own training responses.

| kind | drafter | 4-gram |
|---|---:|---:|
{kind_rows}
| **code and structured, mean over kinds** | **{code:.2f}** | {ngram:.2f} |

| split | code and structured | other |
|---|---:|---:|
{split_rows}

With D = 8 the accept length is {d8_share:.1%} of the mean of min(L, 8) at D = {d}.

{verdict}

## Acceptance by position

Share of steps of the code and structured kinds that accept at least k drafts.

| k | {reach_keys} |
|---|{rule}|
| share | {reach} |

## Calibration

Survival (product of the first k confidences) against what was accepted, unseen prompts, all k;
mean distance (ece) {ece:.3f}.

| predicted | seen | pairs |
|---:|---:|---:|
{decile_rows}
"""


def _verdict(report: Report) -> str:
    if report.ok:
        return "All four figures that this drafter was made for are reached."
    return (
        f"Not all figures aimed at are reached (code 4.5, here {report.code:.2f}; 1.2 times the "
        f"4-gram, here {report.code / report.ngram:.2f}; chat 1.6, here {report.chat:.2f}; D = 8 "
        f"share 0.95, here {report.d8_share:.2f}); `training/curve.jsonl` shows the way so far."
    )


def model_card(report: Report, layer_ids: Sequence[int], **facts: Any) -> str:
    """Returns the card's text. `facts`: the template's fields that the report does not have."""
    kinds = sorted(report.by_kind, key=lambda kind: -report.by_kind[kind])
    return _CARD.format(
        **facts,
        layer_ids=", ".join(map(str, layer_ids)),
        kind_rows="\n".join(
            f"| {kind} | {report.by_kind[kind]:.2f} | {report.ngram_by_kind[kind]:.2f} |"
            for kind in kinds
        ),
        split_rows="\n".join(
            f"| {split} | {means.get('code', float('nan')):.2f} | "
            f"{means.get('other', float('nan')):.2f} |"
            for split, means in report.by_split.items()
        ).replace("nan", "-"),
        code=report.code,
        ngram=report.ngram,
        d8_share=report.d8_share,
        verdict=_verdict(report),
        reach_keys=" | ".join(str(k + 1) for k in range(len(report.reach))),
        rule="|".join("---:" for _ in report.reach),
        reach=" | ".join(f"{share:.2f}".lstrip("0") for share in report.reach),
        ece=report.ece,
        decile_rows="\n".join(
            f"| {d.predicted:.2f} | {d.seen:.2f} | {d.count} |" for d in report.deciles if d.count
        ),
    )
