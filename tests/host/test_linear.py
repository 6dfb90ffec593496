"""Packed weights of a CPU: the same products, and never those of older weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from dcut_sglang.host import weights  # noqa: E402
from dcut_sglang.host.cpu.linear import apply_linear, compute_lm_head, packed_linear  # noqa: E402
from dcut_sglang.host.head import DraftHead, draft_vocabulary  # noqa: E402
from dcut_sglang.host.metrics import StepTimer  # noqa: E402
from dcut_sglang.token_set import encode_tokens  # noqa: E402

OUT, IN = 640, 512
HIDDEN = 16


@pytest.mark.parametrize("shape", [(1,), (2,), (5,), (33,), (2, 3), (0,)])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype, rtol", [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_products_are_those_of_the_weights(
    shape: tuple[int, ...], with_bias: bool, dtype: torch.dtype, rtol: float
) -> None:
    weight = torch.nn.Parameter(torch.randn(OUT, IN, dtype=dtype), requires_grad=False)
    bias = torch.randn(OUT, dtype=dtype) if with_bias else None
    for _ in range(2):
        x = torch.randn(*shape, IN, dtype=dtype)
        exact = torch.nn.functional.linear(
            x.double(), weight.double(), None if bias is None else bias.double()
        )
        found = packed_linear(x, weight, bias)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), exact, rtol=rtol, atol=10 * rtol)


def test_rows_that_are_not_contiguous() -> None:
    weight, x = torch.randn(OUT, IN), torch.randn(IN, 7).t()
    torch.testing.assert_close(packed_linear(x, weight, None), x @ weight.t(), rtol=1e-4, atol=1e-4)


def test_an_update_of_the_weights_is_seen() -> None:
    weight, x = torch.nn.Parameter(torch.randn(OUT, IN), requires_grad=False), torch.randn(3, IN)
    packed_linear(x, weight, None)
    weight.data.copy_(torch.randn(OUT, IN))
    assert weights.note_update("result", object(), recv_req=None) == "result"
    torch.testing.assert_close(packed_linear(x, weight, None), x @ weight.t(), rtol=1e-4, atol=1e-4)


def test_bf16_is_packed_where_the_cpu_has_it() -> None:
    weight = torch.randn(OUT, IN, dtype=torch.bfloat16)
    packed_linear(torch.randn(3, IN, dtype=torch.bfloat16), weight, None)
    assert hasattr(weight, "_dcut_packed") == torch.ops.mkldnn._is_mkldnn_bf16_supported()


def never(*_: Any, **__: Any) -> torch.Tensor:
    raise AssertionError("SGLang's own path was taken")


@pytest.mark.parametrize(
    "weight",
    [
        torch.randn(OUT, IN, dtype=torch.float16),
        torch.randn(8, 8),
        torch.randn(IN, OUT).t(),
    ],
    ids=["fp16", "small", "transposed"],
)
def test_other_weights_stay_with_sglang(weight: torch.Tensor) -> None:
    x = torch.randn(3, weight.shape[1], dtype=weight.dtype)
    answer = torch.zeros(1)
    layer, processor = SimpleNamespace(weight=weight), SimpleNamespace(rl_on_policy_target=None)
    assert apply_linear(lambda *_: answer, None, layer, x) is answer  # type: ignore[arg-type]
    assert compute_lm_head(lambda *_, **__: answer, processor, x, layer) is answer


def test_layers_and_heads_take_the_packed_path() -> None:
    weight, x = torch.randn(OUT, IN), torch.randn(3, IN)
    layer, processor = SimpleNamespace(weight=weight), SimpleNamespace(rl_on_policy_target=None)
    for found in (
        apply_linear(never, None, layer, x, None),  # type: ignore[arg-type]
        compute_lm_head(never, processor, x, layer, None),
    ):
        torch.testing.assert_close(found, x @ weight.t(), rtol=1e-4, atol=1e-4)


# -- the draft head -------------------------------------------------------------------------------


def ranks() -> Any:
    return SimpleNamespace(best_of_shards=lambda top, token, total: (token, total))


def test_a_short_head_drafts_the_best_of_its_tokens() -> None:
    head = SimpleNamespace(weight=torch.randn(101, HIDDEN) * 3)
    ids = torch.tensor([3, 12, 40, 41, 99])
    hidden = torch.randn(50, HIDDEN)
    draft_head = DraftHead(head, ranks(), ids)
    assert draft_head.num_tokens == 5
    token, confidence = draft_head(hidden, StepTimer())
    shares = torch.softmax((hidden @ head.weight.t())[:, ids], dim=-1)
    best, place = shares.max(dim=-1)
    assert torch.equal(token, ids[place])
    torch.testing.assert_close(confidence, best)


def test_the_whole_head_without_padding_and_after_an_update() -> None:
    shard = SimpleNamespace(org_vocab_start_index=0, num_org_elements=90)
    head = SimpleNamespace(weight=torch.randn(101, HIDDEN), shard_indices=shard)
    hidden = torch.randn(20, HIDDEN)
    draft_head = DraftHead(head, ranks(), None)
    for _ in range(2):
        token, _ = draft_head(hidden, StepTimer())
        assert torch.equal(token, (hidden @ head.weight[:90].t()).argmax(-1))
        head.weight = torch.randn(101, HIDDEN)
        weights.note_update(None)


def test_a_checkpoint_s_vocabulary_is_read_and_a_wrong_one_refused() -> None:
    config = SimpleNamespace(dflash_config={"draft_vocabulary": encode_tokens([2, 7], 64)})
    found = draft_vocabulary(config, 64)
    assert found is not None and found.tolist() == [2, 7]
    assert draft_vocabulary(SimpleNamespace(dflash_config={}), 64) is None
    assert draft_vocabulary(SimpleNamespace(), 64) is None
    with pytest.raises(ValueError, match="another vocabulary"):
        draft_vocabulary(config, 128)
