"""SGLang's other speculative algorithms on a CPU: which ones run, and their draft attention.

What they leave undone here, as SGLang has it: no overlap scheduling, and greedy verification at
any temperature. Compare them on greedy requests only.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

from dcut_sglang.host.cpu.activate import BACKEND_NAME

_RUN = ("DFLASH", "DCUT", "STANDALONE", "EAGLE3")
# SGLang compiles NGRAM's trie when the server starts.
_NGRAM_TOOLS = ("g++", "ninja")


def runs_on_cpu(algorithm: str) -> str | None:
    """Why a speculative algorithm does not run on a CPU with this package, or None if it does.

    ``algorithm`` is a value of ``--speculative-algorithm``. STANDALONE and EAGLE3 run as chains:
    ``--speculative-eagle-topk 1``.
    """
    if algorithm == "NGRAM":
        missing = [tool for tool in _NGRAM_TOOLS if shutil.which(tool) is None]
        if missing:
            return f"NGRAM compiles its trie at start-up and finds no {' and no '.join(missing)}"
        return None
    if algorithm in _RUN:
        return None
    return f"{algorithm} has not been tried on a CPU; {', '.join((*_RUN, 'NGRAM'))} run"


class ChainDraftAttention:
    """The attention of a draft model's forwards in one step, all planned before the first.

    Forward i of a chain has one query per request over its text and i + 1 drafts, whose slots
    are the ones behind the text. ``attn_backends[i]`` is what SGLang lets forward i run with.
    """

    def __init__(self, model_runner: Any, topk: int, num_steps: int) -> None:
        """Raises ValueError for trees (top-k above 1)."""
        from dcut_sglang.host.cpu.attention import TorchVarlenAttnBackend

        if topk != 1:
            raise ValueError(
                f"on this CPU draft models run as chains, got top-k {topk}; "
                "set --speculative-eagle-topk 1"
            )
        # The first draft comes with the step before, so one forward less than drafts.
        self.attn_backends = [TorchVarlenAttnBackend(model_runner) for _ in range(num_steps - 1)]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan every forward; ``seq_lens`` is the text without drafts."""
        import torch

        seq_lens = forward_batch.seq_lens[: forward_batch.batch_size].to(torch.int64)
        for step, backend in enumerate(self.attn_backends):
            backend.describe(forward_batch, torch.ones_like(seq_lens), seq_lens + step + 1)


def create_draft_backend(
    original: Callable[..., Any],
    factory: Any,
    backend_name: str,
    backend_map: dict[str, Callable[[], Any]],
    error_template: str,
    stamps_children: bool = False,
) -> Any:
    """AROUND hook: SGLang's table of draft attention backends, with this CPU's in it.

    ``stamps_children`` is set for the backend of a draft model's chain of forwards, and not for
    the one that runs it over accepted tokens.
    """

    def create() -> tuple[str, Any]:
        from dcut_sglang.host.cpu.attention import TorchVarlenAttnBackend

        runner = factory.draft_model_runner
        if stamps_children:
            chain = ChainDraftAttention(runner, factory.topk, factory.speculative_num_steps)
            return BACKEND_NAME, chain
        return BACKEND_NAME, TorchVarlenAttnBackend(runner)

    return original(
        factory,
        backend_name,
        {**backend_map, BACKEND_NAME: create},
        error_template,
        stamps_children,
    )
