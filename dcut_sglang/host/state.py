"""DCUT in SGLang's internal state: shown by ``/server_info``, set by ``/set_internal_state``."""

from __future__ import annotations

from typing import Any

from dcut_sglang import __version__
from dcut_sglang.force import KNOBS, apply_knob


def _dcut_worker(controller: Any) -> Any | None:
    from dcut_sglang.host.worker import DCutWorker

    worker = controller.scheduler.draft_worker
    return worker if isinstance(worker, DCutWorker) else None


def describe(worker: Any) -> dict[str, Any]:
    """The ``dcut`` object of ``/server_info``. Syncs once with the device."""
    controller, correction = worker.controller, worker.learning.correction
    return {
        "version": __version__,
        "active": True,
        "block_size": worker.block_size,
        "forced": worker.forced.describe() if worker.forced is not None else None,
        "mode": controller.mode,
        "config": worker.config.to_dict(),
        "probe_s": round(worker.probe_s, 3),
        "cost_table": worker.selector.cost.to_json(),
        "cost_correction": correction.to_json() if correction else None,
        "calibration": controller.calibration.to_json(),
        "kv_slots_free": worker.model_runner.token_to_kv_pool_allocator.available_size(),
        "request_slots_free": worker.model_runner.req_to_token_pool.available_size(),
        **worker.metrics.snapshot(),
    }


def add_dcut(result: None, controller: Any, state: dict[str, Any]) -> None:
    """AFTER hook on ``_add_speculative``: the worker's description under ``dcut``."""
    from dcut_sglang.host.hooks import dcut_active

    if dcut_active():
        worker = _dcut_worker(controller)
        if worker is not None:
            state["dcut"] = describe(worker)


def add_knobs(handlers: dict[str, Any], controller: Any) -> dict[str, Any]:
    """AFTER hook on ``_update_handlers``: one handler per knob of ``dcut_sglang.force``."""
    from sglang.srt.managers.scheduler_components.internal_state import (
        UpdateRejected,
        _UpdateHandler,
    )

    worker = _dcut_worker(controller)
    if worker is None:
        return handlers

    def validate(name: str, value: Any) -> None:
        # Everything is checked here: SGLang does not catch what apply raises.
        try:
            apply_knob(worker.forced, name, value, worker.block_size)
        except ValueError as error:
            raise UpdateRejected(str(error)) from error

    def apply(name: str, value: Any) -> None:
        worker.forced = apply_knob(worker.forced, name, value, worker.block_size)

    def reset_metrics(name: str, value: Any) -> None:
        worker.metrics.reset()

    handlers.update({name: _UpdateHandler(validate, apply) for name in KNOBS})
    handlers["dcut_reset_metrics"] = _UpdateHandler(lambda name, value: None, reset_metrics)
    return handlers
