"""What SGLang asks of a speculative algorithm, answered for DCUT."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from dcut_sglang.host import server_args as arguments

NAME = "DCUT"


def worker_class(server_args: Any) -> type:
    """Factory that the registry stores: the worker class for these arguments."""
    from dcut_sglang.host.worker import DCutWorker

    return DCutWorker


class DCutAlgorithm(CustomSpecAlgo):
    """DCUT is a member of the DFLASH family with ragged verification.

    ``problems`` holds why this SGLang cannot carry it; the name then refuses to start.
    """

    problems: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def check_server_args(cls, server_args: Any) -> None:
        """Refuse what DCUT does not serve, in the launcher, before anything is loaded."""
        if cls.problems:
            raise ValueError("DCUT cannot start: " + "; ".join(cls.problems))
        arguments.check(server_args)

    def handle_server_args(self, server_args: Any) -> None:
        arguments.settle(server_args)

    def is_dflash(self) -> bool:
        return True

    def is_dflash_family(self) -> bool:
        return True

    def supports_target_verify_for_draft(self) -> bool:
        return True

    def supports_ragged_verify(self) -> bool:
        return True

    def supports_grammar_overlap(self) -> bool:
        # Masks are built behind the barrier that SGLang hands to the worker.
        return True

    def supports_prefill_shared_read_done(self) -> bool:
        return True

    # The scheduler calls the three below on every algorithm, but the registry's base class
    # lacks them (its conformance check looks at is_* and supports_* only).

    def carries_draft_hidden_states(self) -> bool:
        return False

    def need_topk(self) -> bool:
        return False

    def create_future_map(
        self,
        device: torch.device,
        req_to_token_pool: Any,
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> Any:
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(
            device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay
        )
