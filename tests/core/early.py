"""Recorded texts and costs that do not change when a drafter is trained anew."""

from __future__ import annotations

from pathlib import Path

_DATA = Path(__file__).parent / "data"
# 5,687 anchors of 70 texts, an early one-layer drafter for SmolLM2-135M-Instruct, D = 16.
EARLY_TEXTS = _DATA / "early_texts.npz"
# That pair on a CPU with bf16 instructions, one thread; see the fingerprint. Shorter blocks are
# taken to cost 0.4 (D = 4) and 0.6 (D = 8) of the whole one.
EARLY_COSTS = _DATA / "early_costs.json"
