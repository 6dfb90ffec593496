"""Greedy decoding of many prompts at once, storing the hidden states that a drafter reads.

Rows of a static KV cache are refilled as requests end, so that the matrices stay large; the start
that all prompts share (a system prompt, say) is computed once. Works with any model of
transformers whose decoder layers are Llama's or Qwen3's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dcut_sglang.training.responses import Response

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ARCHITECTURES = ("LlamaForCausalLM", "Qwen3ForCausalLM")
_ATTENTION = "dcut_grouped"
# Free rows are refilled once this share of them waits: prompts computed together cost less.
_REFILL_SHARE = 1 / 12
_MAX_FLOAT16 = torch.finfo(torch.float16).max


def _grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Grouped-query attention that does not copy keys and values per query head.

    query: [B, heads, T, head_dim]; key, value: [B, kv_heads, S, head_dim]; attention_mask: added
    to the scores, [B, 1, T, S]. Returns [B, T, heads, head_dim].
    """
    batch, num_heads, num_tokens, head_dim = query.shape
    num_kv_heads, group = key.shape[1], num_heads // key.shape[1]
    folded = (query * scaling).reshape(batch * num_kv_heads, group * num_tokens, head_dim)
    scores = torch.bmm(folded, key.flatten(0, 1).transpose(1, 2))
    scores = scores.view(batch, num_kv_heads, group, num_tokens, -1) + attention_mask[:, :, None]
    shares = scores.float().softmax(-1).to(value.dtype).view(len(folded), group * num_tokens, -1)
    out = torch.bmm(shares, value.flatten(0, 1))
    return out.view(batch, num_heads, num_tokens, head_dim).transpose(1, 2), None


class _RowCache:
    """Keys and values of every layer: [rows, kv_heads, max_length, head_dim].

    `select` says which rows and positions the next forward pass writes; `update` is what
    transformers' attention calls.
    """

    def __init__(self, target: PreTrainedModel, num_rows: int, max_length: int) -> None:
        config = target.config
        head_dim = getattr(config, "head_dim", None)
        head_dim = head_dim or config.hidden_size // config.num_attention_heads
        shape = (num_rows, config.num_key_value_heads, max_length, head_dim)
        options: dict[str, Any] = {"dtype": target.dtype, "device": target.device}
        self._layers = [
            (torch.zeros(shape, **options), torch.zeros(shape, **options))
            for _ in range(config.num_hidden_layers)
        ]
        self._rows: Tensor | None = None
        self._positions = torch.zeros(0)
        self._num_known = 0

    def select(self, rows: Tensor | None, positions: Tensor, num_known: int) -> None:
        """rows: int64 [n], or None for all; positions: int64 [n, T]; attends to num_known keys."""
        self._rows, self._positions, self._num_known = rows, positions, num_known

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any) -> tuple[Tensor, Tensor]:
        keys, values = self._layers[layer]
        rows = self._rows
        places = torch.arange(len(keys), device=keys.device) if rows is None else rows
        keys[places[:, None], :, self._positions] = key.transpose(1, 2)
        values[places[:, None], :, self._positions] = value.transpose(1, 2)
        known_keys, known_values = keys[:, :, : self._num_known], values[:, :, : self._num_known]
        return (
            (known_keys, known_values) if rows is None else (known_keys[rows], known_values[rows])
        )

    def keep(self, rows: Tensor) -> None:
        """Drops all other rows and renumbers these from zero."""
        self._layers = [(key[rows], value[rows]) for key, value in self._layers]

    def repeat_first(self, num_known: int) -> None:
        """Copies the first positions of row 0 to all rows."""
        for key, value in self._layers:
            key[:, :, :num_known] = key[:1, :, :num_known].clone()
            value[:, :, :num_known] = value[:1, :, :num_known].clone()


@contextmanager
def _grouped(target: PreTrainedModel) -> Iterator[None]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, _grouped_attention)
    before = target.config._attn_implementation
    target.config._attn_implementation = _ATTENTION
    try:
        yield
    finally:
        target.config._attn_implementation = before


class _Decoder:
    """Forward passes over rows of the cache; features stay beside it, as float16."""

    def __init__(
        self, target: PreTrainedModel, layer_ids: Sequence[int], num_rows: int, max_length: int
    ) -> None:
        self._target, self._layer_ids = target, set(layer_ids)
        self.cache = _RowCache(target, num_rows, max_length)
        size = len(layer_ids) * target.config.hidden_size
        self.features = torch.zeros(
            num_rows, max_length, size, dtype=torch.float16, device=target.device
        )

    def forward(self, rows: Tensor | None, ids: Tensor, positions: Tensor) -> Tensor:
        """ids, positions: int64 [n, T]. Returns the last layer's output, [n, T, hidden]."""
        model = self._target.model
        num_known = int(positions.max()) + 1
        self.cache.select(rows, positions, num_known)
        hidden = model.embed_tokens(ids)
        hidden_from = torch.arange(num_known, device=ids.device) > positions[:, None, :, None]
        mask = torch.zeros(hidden_from.shape, dtype=hidden.dtype, device=ids.device)
        mask.masked_fill_(hidden_from, torch.finfo(hidden.dtype).min)
        rotation = model.rotary_emb(hidden, position_ids=positions)
        kept = []
        for index, layer in enumerate(model.layers):
            hidden = layer(
                hidden,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=self.cache,
                use_cache=True,
                position_embeddings=rotation,
            )
            if index in self._layer_ids:
                kept.append(hidden)
        features = torch.cat(kept, dim=-1).clamp(-_MAX_FLOAT16, _MAX_FLOAT16).half()
        places = torch.arange(len(ids), device=ids.device) if rows is None else rows
        self.features[places[:, None], positions] = features
        return hidden

    def next_token_ids(self, hidden: Tensor) -> Tensor:
        """hidden: [n, hidden]; returns int64 [n], the target's greedy choice."""
        return self._target.lm_head(self._target.model.norm(hidden)).argmax(-1)

    def keep(self, rows: Tensor) -> None:
        self.cache.keep(rows)
        self.features = self.features[rows]

    def repeat_first(self, num_known: int) -> None:
        self.cache.repeat_first(num_known)
        self.features[:, :num_known] = self.features[:1, :num_known].clone()


def check_architecture(target: PreTrainedModel) -> None:
    """Raises ValueError unless the target's layers can be driven by `decode`."""
    name = type(target).__name__
    if name not in ARCHITECTURES:
        raise ValueError(f"unsupported target {name}; expected one of {', '.join(ARCHITECTURES)}")


def shared_prefix_length(prompts: Sequence[Sequence[int]]) -> int:
    """Returns how many leading tokens all prompts share, leaving at least one of each."""
    columns = zip(*(prompt[:-1] for prompt in prompts), strict=False)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))


@torch.inference_mode()
def decode(
    target: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    layer_ids: Sequence[int],
    max_new_tokens: int,
    eos_token_id: int,
    num_rows: int = 96,
    deadline_s: float | None = None,
) -> Iterator[tuple[int, Response]]:
    """Yields (index of the prompt, response) as requests end, in no fixed order.

    Features are float16, on the CPU, for all tokens that were fed (the last token's are zero: no
    block reads them). `deadline_s` is a time.monotonic() after which unfinished requests are
    dropped. The end-of-text token is kept.
    """
    check_architecture(target)
    if not prompts:
        return
    num_rows = min(num_rows, len(prompts))
    max_length = max(len(prompt) for prompt in prompts) + max_new_tokens
    decoder = _Decoder(target, layer_ids, num_rows, max_length)
    device = target.device
    prefix = shared_prefix_length(prompts)
    waiting = list(range(len(prompts)))[::-1]
    texts: list[list[int]] = [[] for _ in range(num_rows)]
    owners = [-1] * num_rows
    with _grouped(target):
        if prefix:
            ids = torch.tensor([list(prompts[0][:prefix])], device=device)
            places = torch.arange(prefix, device=device)[None]
            decoder.forward(torch.zeros(1, dtype=torch.long, device=device), ids, places)
            decoder.repeat_first(prefix)
        while deadline_s is None or time.monotonic() < deadline_s:
            free = [row for row, owner in enumerate(owners) if owner < 0]
            if waiting and (len(free) >= len(owners) * _REFILL_SHARE or len(waiting) < len(free)):
                for row in free[: len(waiting)]:
                    owners[row] = waiting.pop()
                    texts[row] = list(prompts[owners[row]])
                new = [row for row in free if owners[row] >= 0]
                _prefill(decoder, new, texts, prefix, device)
            else:
                active = [row for row, owner in enumerate(owners) if owner >= 0]
                if not active:
                    break
                if not waiting and 2 * len(active) <= len(owners):
                    decoder.keep(torch.tensor(active, device=device))
                    texts, owners = [texts[r] for r in active], [owners[r] for r in active]
                # A free row repeats its last token, so that all rows run in one batch.
                ids = torch.tensor([[t[-1]] for t in texts], device=device)
                places = torch.tensor([[len(t) - 1] for t in texts], device=device)
                hidden = decoder.forward(None, ids, places)
                chosen = decoder.next_token_ids(hidden[:, -1]).tolist()
                for row, owner in enumerate(owners):
                    if owner >= 0:
                        texts[row].append(chosen[row])
            for row, owner in enumerate(owners):
                num_prompt = len(prompts[owner])
                ended = owner >= 0 and texts[row][-1] == eos_token_id
                if owner >= 0 and (ended or len(texts[row]) - num_prompt >= max_new_tokens):
                    features = decoder.features[row, : len(texts[row])].to("cpu", copy=True)
                    features[-1] = 0
                    ids = torch.tensor(texts[row])
                    owners[row], texts[row] = -1, texts[row][:1]
                    yield owner, Response(ids, features, num_prompt, ended)


def _prefill(
    decoder: _Decoder, rows: list[int], texts: list[list[int]], prefix: int, device: torch.device
) -> None:
    """Computes the prompts of these rows behind the shared prefix and appends a token to each."""
    rests = [torch.tensor(texts[row][prefix:], device=device) for row in rows]
    ids = nn.utils.rnn.pad_sequence(rests, batch_first=True)
    places = prefix + torch.arange(ids.shape[1], device=device).expand(ids.shape)
    # What padding writes lies behind the prompt, where decoding overwrites it before reading.
    hidden = decoder.forward(torch.tensor(rows, device=device), ids, places)
    last = torch.tensor([len(rest) - 1 for rest in rests], device=device)
    chosen = decoder.next_token_ids(hidden[torch.arange(len(rows), device=device), last])
    for row, token in zip(rows, chosen.tolist(), strict=True):
        texts[row].append(token)
