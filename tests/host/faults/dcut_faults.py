"""An SGLang plugin for tests: makes one tensor-parallel rank slow, and its confidences wrong.

``test_two_ranks.py`` puts this folder on the servers' path, with the metadata that makes SGLang
load it as it loads any plugin.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import replace
from typing import Any

import torch

logger = logging.getLogger(__name__)
RANK = "DCUT_TEST_FAULTY_RANK"


def register() -> None:
    """Wrap the decode step's draft and decide; only the named rank misbehaves."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if RANK in os.environ:
        HookRegistry.register("dcut_sglang.host.worker.draft_blocks", _disturb, HookType.AROUND)


def _disturb(draft_blocks: Any, worker: Any, *args: Any, **kwargs: Any) -> Any:
    drafts = draft_blocks(worker, *args, **kwargs)
    if worker.ranks.group.rank_in_group != int(os.environ[RANK]):
        return drafts
    logger.info("dcut_faults: this rank is late and unsure")
    time.sleep(0.02)
    noise = torch.rand(drafts.confidence.shape, device=drafts.confidence.device)
    return replace(drafts, confidence=(drafts.confidence * noise).clamp(0, 1))
