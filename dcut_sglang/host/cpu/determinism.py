"""``--enable-deterministic-inference`` on a CPU: seeds, without CUDA's batch-invariant kernels."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


def enable_batch_invariant_mode(enable_bmm: bool = True) -> None:
    """REPLACE hook: SGLang swaps GEMMs for Triton kernels here, which a CPU does not run.

    Seeds work all the same. What is lost: the size of a batch moves logits by rounding, so a
    seeded draw can differ between two batches where it falls within that of a boundary.
    """
    logger.info(
        "dcut_sglang: batch-invariant kernels are for GPUs; on this CPU seeds are honoured and "
        "logits are equal across batch sizes to rounding only"
    )
