"""The draft head: the target's output matrix over draft hidden states, with confidences."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.lora.layers import unwrap_lora_layer

from dcut_sglang.host import weights
from dcut_sglang.host.device import linear
from dcut_sglang.host.metrics import StepTimer
from dcut_sglang.host.ranks import Ranks
from dcut_sglang.token_set import decode_tokens

# Rows of logits computed at a time: bounds memory at large batches. On a CPU, the GEMM of 64
# rows costs half as much again per row as that of 256.
_CHUNK_ROWS = 256
# exp() of less than this is denormal in float32, which some CPUs compute 20 times slower, and
# adds nothing to a sum that holds a 1.
_MIN_LOG_RATIO = -80.0


class DraftHead:
    """Tokens and confidences of drafts.

    Where the drafter's checkpoint names the tokens that it drafts, the head is a copy of these
    rows of the target's: a draft outside of them would be rare, and would be cut or rejected
    like any other. Confidences are probabilities among them.

    Args:
        lm_head: the target's ``lm_head``, this rank's shard of it.
        ranks: hold the other shards.
        token_ids: int64 [n] on the host, ascending, the tokens to draft; None: all.
    """

    def __init__(self, lm_head: Any, ranks: Ranks, token_ids: torch.Tensor | None) -> None:
        self._lm_head = unwrap_lora_layer(lm_head)
        self._ranks = ranks
        self.num_tokens = None if token_ids is None else len(token_ids)
        shard = getattr(self._lm_head, "shard_indices", None)
        self._first = shard.org_vocab_start_index if shard is not None else 0
        self._num_rows = shard.num_org_elements if shard is not None else None
        self._token_ids: torch.Tensor | None = None
        if token_ids is not None:
            size = self._num_rows or self._lm_head.weight.shape[0]
            own = token_ids[(token_ids >= self._first) & (token_ids < self._first + size)]
            # A shard without any of them still has to bring something to the comparison.
            own = own if len(own) else torch.tensor([self._first])
            self._token_ids = own.to(self._lm_head.weight.device)
        self._rows: torch.Tensor | None = None
        self._version = -1

    def __call__(self, hidden: torch.Tensor, timer: StepTimer) -> tuple[torch.Tensor, torch.Tensor]:
        """Token and confidence of each row of draft hidden states.

        Args:
            hidden: [rows, hidden].
            timer: receives the confidence's share of the time, as a phase of its own.

        Returns:
            int64 [rows] and float32 [rows]. No host sync.
        """
        return greedy_with_confidence(
            hidden,
            self._weight(),
            timer,
            ranks=self._ranks,
            first_token=self._first,
            token_ids=self._token_ids,
        )

    def _weight(self) -> torch.Tensor:
        weight = self._lm_head.weight
        if self._token_ids is None and self._num_rows in (None, len(weight)):
            return weight
        # One tensor from call to call: on a CPU its packed copy hangs on it.
        if self._rows is None or self._version != weights.version():
            if self._token_ids is None:
                self._rows = weight.detach()[: self._num_rows]
            else:
                self._rows = weight.detach()[self._token_ids - self._first].contiguous()
            self._version = weights.version()
        return self._rows


def draft_vocabulary(draft_hf_config: Any, vocab_size: int) -> torch.Tensor | None:
    """The tokens that a checkpoint was trained to draft: int64 [n] ascending; None: all.

    Raises:
        ValueError: ``dflash_config.draft_vocabulary`` cannot be read, or is another vocabulary's.
    """
    dflash_config = getattr(draft_hf_config, "dflash_config", None) or {}
    text = dflash_config.get("draft_vocabulary")
    return None if text is None else torch.from_numpy(decode_tokens(text, vocab_size))


def greedy_with_confidence(
    hidden: torch.Tensor,
    head_weight: torch.Tensor,
    timer: StepTimer,
    *,
    ranks: Ranks,
    first_token: int,
    token_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Most likely token of each row, and its softmax probability.

    ``max`` gives both value and index (on a CPU, ``argmax`` of bf16 logits alone is four times
    slower), and the probability of the maximum is 1 / sum(exp(logits - max)).

    Args:
        hidden: [rows, hidden], draft hidden states.
        head_weight: [shard of the vocabulary, hidden], this rank's part of the target's head.
        timer: receives the confidence's share of the time, as a phase of its own.
        ranks: hold the other shards.
        first_token: token id of the shard's first row, where its rows are consecutive tokens.
        token_ids: int64 [shard], the tokens of its rows, where they are not.

    Returns:
        int64 [rows] and float32 [rows]. No host sync.
    """
    tops, tokens, totals = [], [], []
    for chunk in hidden.to(head_weight.dtype).split(_CHUNK_ROWS):
        logits = linear(chunk, head_weight).float()
        top, token = logits.max(dim=-1)
        tops.append(top)
        tokens.append(token + first_token if token_ids is None else token_ids[token])
        with timer.apart("confidence"):
            log_ratio = logits.sub_(top[:, None]).clamp_(min=_MIN_LOG_RATIO)
            totals.append(log_ratio.exp_().sum(dim=-1))
    token, total = ranks.best_of_shards(torch.cat(tops), torch.cat(tokens), torch.cat(totals))
    return token, total.reciprocal()
