"""The pieces of the decode step that differ by device."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch


def adapt_draft_model(model: torch.nn.Module, device: str | torch.device) -> None:
    """Undo what a loaded draft model assumes about the device, in place."""
    if torch.device(device).type == "cpu":
        from dcut_sglang.host.cpu.dflash import adapt_draft_model as adapt_for_cpu

        adapt_for_cpu(model)


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [rows, in] @ weight [out, in].T. On a CPU, ``weight`` carries its packed copy from call
    to call. No host sync."""
    if weight.device.type == "cpu":
        from dcut_sglang.host.cpu.linear import packed_linear

        return packed_linear(x, weight, None)
    return torch.matmul(x, weight.t())


def argmax_rows(logits: torch.Tensor) -> torch.Tensor:
    """Index of the largest logit of each row, the first of equal ones: int64 [rows]. No host sync.

    On a CPU numpy's is used, five times as fast as torch's ``max`` (and torch's bf16 ``argmax``
    four times slower still): a hundredth of a plain step.
    """
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.float().numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


@functools.cache
def step_clock(device: str | torch.device) -> Callable[[], float]:
    """The clock that steps are priced on, in seconds; reading it is a host sync on CUDA.

    On a CPU it is the CPU time of the calling thread, which takes part in every parallel
    region: what other processes take from this one says nothing about a step. With several
    tensor-parallel ranks it is wall time, since a rank that waits for another pays for it.
    """
    if torch.device(device).type == "cpu":
        several = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
        return time.perf_counter if several else time.thread_time
    module = torch.get_device_module(device)

    def synchronized() -> float:
        module.synchronize()
        return time.perf_counter()

    return synchronized
