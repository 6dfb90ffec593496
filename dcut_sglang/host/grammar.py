"""Grammar masks of the packed rows.

SGLang walks a grammar's matcher along the drafts and back again (srt/speculative/spec_utils.py);
it advances the matcher itself over what was committed, before it processes the step's result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask

from dcut_sglang.host.window import PackedRows


class StepGrammar:
    """Masks of one step. Made before the verify is launched: the drafts' copy to the host starts
    here."""

    def __init__(self, blocks: torch.Tensor, verify_lens: torch.Tensor, vocab_size: int) -> None:
        # The walk ends at the first token that no grammar takes: here at the cut, behind which
        # no row needs a mask.
        cut = torch.arange(blocks.shape[1], device=blocks.device) >= verify_lens[:, None]
        self._tree = GrammarTree.from_linear_chain(blocks.masked_fill(cut, vocab_size))

    def apply(
        self,
        logits: torch.Tensor,
        batch: Any,
        rows: PackedRows,
        barrier: Callable[[], None] | None,
    ) -> None:
        """Make what a grammar forbids impossible in ``logits`` [rows, vocab], in place.

        A row behind an illegal draft keeps all tokens: the row before it cannot choose that
        draft, so nothing is accepted there. Host work, while the device verifies.

        Args:
            barrier: advances the matchers over the previous step's tokens (under overlap); None
                when that has been done.
        """
        mask = build_grammar_vocab_mask(
            reqs=batch.reqs,
            tree=self._tree,
            sampling_info=batch.sampling_info,
            device=logits.device,
            barrier=barrier,
        )
        if mask is not None:
            mask._replace(vocab_mask=mask.vocab_mask[rows.index]).apply(logits)
