"""The baseline of a drafter: an n-gram model over the drafter's own training responses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dcut_sglang.training.evaluate import Propose
from dcut_sglang.training.responses import Response


class NgramModel:
    """Drafts the most frequent continuation of the longest known context.

    An order of n looks at up to n - 1 tokens. Ties go to the smaller token id.
    """

    def __init__(self, texts: Iterable[Sequence[int]], order: int = 4) -> None:
        if order < 2:
            raise ValueError(f"order must be at least 2, got {order}")
        self.order = order
        counts: dict[tuple[int, ...], Counter[int]] = {}
        for text in texts:
            for end, token in enumerate(text):
                for length in range(min(order - 1, end) + 1):
                    counts.setdefault(tuple(text[end - length : end]), Counter())[token] += 1
        self._best = {
            context: min(found.items(), key=lambda item: (-item[1], item[0]))
            for context, found in counts.items()
        }
        self._totals = {context: found.total() for context, found in counts.items()}

    def next(self, text: Sequence[int]) -> tuple[int, float]:
        """Returns the token that follows and its relative frequency."""
        for length in range(min(self.order - 1, len(text)), -1, -1):
            context = tuple(text[len(text) - length :])
            if context in self._best:
                token, count = self._best[context]
                return token, count / self._totals[context]
        raise ValueError("the model has seen no text")

    def draft(self, text: Sequence[int], num_drafts: int) -> tuple[list[int], list[float]]:
        """Continues a text by itself, token by token."""
        known = list(text[-(self.order - 1) :])
        confidence = []
        for _ in range(num_drafts):
            token, share = self.next(known)
            known.append(token)
            confidence.append(share)
        return known[-num_drafts:], confidence


def ngram_proposer(model: NgramModel, responses: Sequence[Response], block_size: int) -> Propose:
    """Returns a `Propose` for `walk`."""
    texts = [response.token_ids.tolist() for response in responses]

    def propose(requests: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
        pairs = zip(requests.tolist(), anchors.tolist(), strict=True)
        drafts = [model.draft(texts[i][: anchor + 1], block_size - 1) for i, anchor in pairs]
        return torch.tensor([d for d, _ in drafts]), torch.tensor([c for _, c in drafts])

    return propose
