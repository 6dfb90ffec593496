"""What each row draws, by SGLang's own sampler: counts against known probabilities.

No server: the rows' logits are the toy target's.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers import sampler as sglang_sampler
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from toy_target import (
    BLOCK,
    LOGITS,
    VOCAB,
    decode,
    filtered,
    tail_probability,
    text_probabilities,
)

from dcut_sglang.host.row_table import RowTable
from dcut_sglang.host.sampling import choose_tokens

# The kinds of requests of one batch; each group has every one of them.
KINDS: tuple[dict[str, float], ...] = (
    {"temperature": 0.8},
    {"temperature": 1.5, "top_p": 0.8},
    {"top_k": 3},
    {"min_p": 0.2},
    {"temperature": 1.2, "top_k": 4, "top_p": 0.9, "min_p": 0.1},
    {"temperature": 0.0},
)
DRAWS = 20_000
RATIOS = (0.25, 0.5, 1.0)
LEVEL = 1e-4 / (len(RATIOS) * len(KINDS))


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's sampler without a server behind it."""
    execution = SimpleNamespace(kernel=SimpleNamespace(sampling_backend="pytorch"))
    monkeypatch.setattr(sglang_sampler, "get_exec", lambda: execution)
    bare = sglang_sampler.Sampler.__new__(sglang_sampler.Sampler)
    torch.nn.Module.__init__(bare)
    bare.enable_deterministic = False
    return bare


def batch_of(params: list[SamplingParams]) -> Any:
    info = SamplingBatchInfo(
        temperatures=torch.tensor([[p.temperature] for p in params]),
        top_ps=torch.tensor([p.top_p for p in params]),
        top_ks=torch.tensor([p.top_k for p in params], dtype=torch.int32),
        min_ps=torch.tensor([p.min_p for p in params]),
        is_all_greedy=False,
        is_any_greedy=True,
        need_top_p_sampling=True,
        need_top_k_sampling=True,
        need_min_p_sampling=True,
        vocab_size=VOCAB,
    )
    return SimpleNamespace(
        reqs=[SimpleNamespace(sampling_params=p) for p in params], sampling_info=info
    )


@pytest.mark.parametrize("ratio", RATIOS)
def test_every_kind_in_one_batch_has_the_targets_probabilities(sampler: Any, ratio: float) -> None:
    torch.manual_seed(int(100 * ratio))
    params = [SamplingParams(**kind) for kind in KINDS]
    batch = batch_of(params * DRAWS)

    def draw(index: torch.Tensor, request: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        lens = torch.bincount(request, minlength=DRAWS * len(KINDS))
        rows = SimpleNamespace(request=request, positions=index % BLOCK)
        return choose_tokens(sampler, LOGITS[last], batch, rows, RowTable(lens))

    texts = decode(DRAWS, len(KINDS), ratio, length=3, draw=draw)
    for i, kind in enumerate(KINDS):
        found = texts.view(DRAWS, len(KINDS), -1)[:, i]
        if kind.get("temperature") == 0.0:
            greedy = [0]
            for _ in range(3):
                greedy.append(int(LOGITS[greedy[-1]].argmax()))
            assert (found == torch.tensor(greedy[1:])).all()
            continue
        rows = torch.stack([filtered(row, **kind) for row in LOGITS])
        assert tail_probability(found, text_probabilities(rows, 0, 3)) > LEVEL, kind
