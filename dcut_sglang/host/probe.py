"""The cost probe's steps on the real forwards, and where its table is kept."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from array import array
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.draft_worker_common import make_draft_input_v2

from dcut_sglang import __version__
from dcut_sglang.config import DCutConfig
from dcut_sglang.cost import CostTable, CostTableError
from dcut_sglang.host.device import step_clock
from dcut_sglang.host.draft import draft_hidden, no_drafts
from dcut_sglang.host.metrics import StepTimer
from dcut_sglang.host.window import BlockWindow, open_window, part_of
from dcut_sglang.machine import allocator, cpu_info
from dcut_sglang.probe import ProbeReport, StepRunner, format_table, probe_costs
from dcut_sglang.survival import keep_best, survival

logger = logging.getLogger(__name__)


class WorkerSteps:
    """``StepRunner`` over a worker that serves nothing yet.

    Every slot of the KV pool is free at start-up, so batches simply name slots, allocating
    none; the rows of the request table that they use are zeroed again by ``close``. Where the
    pool is smaller than a batch needs, requests share slots: they are read as often all the
    same.
    """

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.block_size = int(worker.block_size)
        self._table = worker.model_runner.req_to_token_pool.req_to_token
        self._batch: ScheduleBatch | None = None
        self._confidence = torch.empty(0)

    def open(self, bs: int, context: int) -> None:
        self.close()
        runner, device = self.worker.model_runner, self._table.device
        width = context + self.block_size
        num_slots = runner.token_to_kv_pool_allocator.size
        slots = torch.arange(bs * width, device=device) % num_slots + 1
        # Row 0 is SGLang's padding row.
        rows = torch.arange(1, bs + 1, device=device)
        self._table[1 : bs + 1, :width] = slots.view(bs, width).to(self._table.dtype)
        seq_lens = torch.full((bs,), context, dtype=torch.int64, device=device)
        self._batch = ScheduleBatch(
            reqs=[_request(i) for i in range(bs)],
            req_to_token_pool=runner.req_to_token_pool,
            token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
            model_config=runner.model_config,
            device=self.worker.device,
            spec_algorithm=runner.spec_algorithm,
            forward_mode=ForwardMode.DECODE,
            req_pool_indices=rows,
            seq_lens=seq_lens,
            seq_lens_cpu=seq_lens.cpu(),
            seq_lens_sum=bs * context,
        )
        # Requests of different difficulty, so that verify lengths differ as in service.
        generator = torch.Generator().manual_seed(bs)
        easiness = torch.rand(bs, 1, generator=generator) * 0.5 + 0.5
        self._confidence = easiness.expand(bs, self.block_size - 1).contiguous()

    def _open_window(self) -> BlockWindow:
        """A fresh window of the open batch, undoing what the last verify changed in it."""
        batch = self._batch
        assert batch is not None, "open a batch first"
        batch.forward_mode = ForwardMode.DECODE
        batch.seq_lens_cpu = batch.seq_lens.cpu()
        batch.spec_info = make_draft_input_v2(
            bonus_tokens=torch.zeros_like(batch.seq_lens), new_seq_lens=batch.seq_lens
        )
        return open_window(self.worker, batch, self.block_size)

    def draft(self, block_size: int) -> None:
        window = self._open_window()
        everyone = torch.arange(window.bs)
        draft_hidden(self.worker, self._batch, part_of(self.worker, window, everyone, block_size))

    def head(self, num_rows: int) -> None:
        config = self.worker.draft_model_runner.model_config
        hidden = torch.randn(
            num_rows, config.hidden_size, dtype=config.dtype, device=self.worker.device
        )
        self.worker.draft_head(hidden, StepTimer(self.worker.device))

    def verify(self, num_rows: int) -> int:
        window = self._open_window()
        lens = keep_best(survival(self._confidence), num_rows - window.bs)
        verified, _ = self.worker.verify_and_commit(
            self._batch, window, no_drafts(window), lens.to(window.slots.device), num_rows
        )
        return int(verified.logits.shape[0])

    def close(self) -> None:
        """Leave the request table as it was: zeros."""
        if self._batch is not None:
            self._table[1 : len(self._batch.reqs) + 1].zero_()
        self._batch = None


class LedSteps:
    """``StepRunner`` whose steps all ranks run: the probe's course depends on rank 0's clock."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    def open(self, bs: int, context: int) -> None:
        self._run("open", bs, context)

    def draft(self, block_size: int) -> None:
        self._run("draft", block_size)

    def head(self, num_rows: int) -> None:
        self._run("head", num_rows)

    def verify(self, num_rows: int) -> int:
        return self._run("verify", num_rows)


def _request(index: int) -> Req:
    """A request that no scheduler knows; the forward reads a few of its fields."""
    return Req(
        rid=f"dcut-probe-{index}",
        origin_input_text="",
        origin_input_ids=array("q", [0]),
        sampling_params=SamplingParams(max_new_tokens=1, temperature=0.0),
    )


def load_or_probe(worker: Any, config: DCutConfig) -> tuple[CostTable, float]:
    """The cost table of this server, and the seconds that probing took (0: from a file).

    Raises:
        CostTableError: the configured table cannot be read or was measured elsewhere.
        ProbeError: the probe failed.
        RankError: on tensor-parallel ranks other than 0, either of these on rank 0.
    """
    fingerprint = make_fingerprint(worker, config)
    steps = WorkerSteps(worker)
    try:
        return worker.ranks.led(
            lambda name, *args: getattr(steps, name)(*args),
            lambda run: _load_or_probe(LedSteps(run), worker.device, config, fingerprint),
        )
    finally:
        steps.close()


def _load_or_probe(
    steps: StepRunner, device: Any, config: DCutConfig, fingerprint: dict[str, Any]
) -> tuple[CostTable, float]:
    if config.cost_table is not None:
        table = CostTable.load(Path(config.cost_table).expanduser())
        table.require_fingerprint(fingerprint)
        logger.info("DCUT: cost table from %s", config.cost_table)
        return table, 0.0
    cached = _cache_path(config, fingerprint)
    if cached is not None and cached.exists():
        try:
            table = CostTable.load(cached)
            table.require_fingerprint(fingerprint)
            logger.info("DCUT: cost table from the cache, %s", cached)
            return table, 0.0
        except CostTableError as error:
            logger.warning("DCUT: cached cost table not used, measuring again: %s", error)
    report = _probe(steps, device, config, fingerprint)
    logger.info(
        "DCUT: measured step costs in %.1f s (%d steps), ms:\n%s",
        report.probe_s,
        report.num_steps,
        format_table(report.table),
    )
    if cached is not None:
        try:
            report.table.save(cached)
            logger.info("DCUT: cost table kept in %s", cached)
        except OSError as error:
            logger.warning(
                "DCUT: the cost table could not be kept (%s); the next start measures again. "
                "Set cost_cache_dir to a folder with space, or to an empty string.",
                error,
            )
    return report.table, report.probe_s


def _probe(
    steps: StepRunner, device: Any, config: DCutConfig, fingerprint: dict[str, Any]
) -> ProbeReport:
    return probe_costs(
        steps,
        block_size=fingerprint["block_size"],
        short_blocks=fingerprint["short_blocks"],
        max_bs=fingerprint["max_running_requests"],
        contexts=fingerprint["contexts"],
        budget_s=config.probe_budget_s,
        fingerprint=fingerprint,
        step_clock=step_clock(device),
        progress=lambda line: logger.info("DCUT cost probe: %s", line),
    )


def short_blocks(worker: Any) -> tuple[int, ...]:
    """Block sizes below D that the drafter's checkpoint says it was trained for
    (``dflash_config.block_sizes``), ascending."""
    config = worker.draft_model_runner.model_config.hf_config
    sizes = (getattr(config, "dflash_config", None) or {}).get("block_sizes", [])
    return tuple(sorted({int(n) for n in sizes if 2 <= n < worker.block_size}))


def make_fingerprint(worker: Any, config: DCutConfig) -> dict[str, Any]:
    """Everything that a measured cost depends on, as plain JSON values."""
    runner = worker.model_runner
    longest = runner.model_config.context_len - 2 * worker.block_size
    contexts = sorted({max(1, min(n, longest)) for n in config.probe_contexts})
    if len(contexts) == 1:
        contexts = sorted({max(1, contexts[0] // 2), contexts[0]})
    return {
        "dcut_sglang": f"{__version__}:{_code_digest()}",
        "sglang": version("sglang"),
        "torch": torch.__version__,
        "device": _device_name(worker.device),
        "threads": torch.get_num_threads(),
        "allocator": allocator(),
        "ranks": worker.ranks.size,
        "dtype": str(runner.dtype),
        "attention_backend": type(runner.attn_backend).__name__,
        "target": _identity(runner.model_config),
        "drafter": _identity(worker.draft_model_runner.model_config),
        "block_size": worker.block_size,
        "short_blocks": list(short_blocks(worker)),
        "draft_vocabulary": worker.draft_head.num_tokens,
        "max_running_requests": int(runner.max_running_requests),
        "page_size": int(worker.page_size),
        "contexts": contexts,
        "probe_budget_s": config.probe_budget_s,
    }


def _code_digest() -> str:
    """Digest of this package's step code, which is part of what is measured."""
    package = Path(__file__).resolve().parents[1]
    sources = [*package.glob("*.py"), *package.glob("host/**/*.py")]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(sources)))
    return digest.hexdigest()[:12]


def _identity(model_config: Any) -> str:
    """Name and shape of a model; costs do not depend on what its weights hold."""
    shape = json.dumps(model_config.hf_config.to_dict(), sort_keys=True, default=str)
    digest = hashlib.sha256(shape.encode()).hexdigest()[:16]
    return f"{os.path.basename(os.path.normpath(model_config.model_path))}:{digest}"


def _device_name(device: Any) -> str:
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return cpu_info().get("model name") or platform.processor() or platform.machine()


def _cache_path(config: DCutConfig, fingerprint: dict[str, Any]) -> Path | None:
    if not config.cost_cache_dir:
        return None
    digest = hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()[:16]
    return Path(config.cost_cache_dir).expanduser() / f"cost-{digest}.json"
