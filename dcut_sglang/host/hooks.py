"""Every function of SGLang that DCUT wraps, in one table.

Hooks are the third choice, after registering and subclassing, and each says why those do not
reach. SGLang's hook registry logs a failing hook and goes on, so ``verify_hooks`` checks that
each took; the worker calls it before serving.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_spec

from dcut_sglang.host import aborts, flag, passes, requests, sampling, state, weights
from dcut_sglang.host.cpu import allocation, determinism, linear, rivals
from dcut_sglang.host.cpu.activate import cpu_engine_enabled


@dataclass(frozen=True)
class Hook:
    """A wrapped function: its path, what wraps it, and why.

    Resolving a path imports its module, so what only the launcher runs (arguments, HTTP,
    tokenizer) is not hooked in the processes it spawns.
    """

    target: str
    wrapper: Callable[..., Any]
    kind: HookType
    why: str
    cpu_only: bool = False
    launcher_only: bool = False


def dcut_active() -> bool:
    """Whether this server runs DCUT (the plugin is loaded for every SGLang server)."""
    return get_spec().speculative_algorithm == "DCUT"


def _row_headroom(extra_context_len: int) -> int:
    """The scheduler reserves 2 * D slots past the committed length, but SGLang 0.5.23 gives a
    request's table row only 4 + D columns past the context limit. Builtin DFLASH leaks the
    difference when a request runs to the limit, and the scheduler dies of it."""
    if not dcut_active():
        return extra_context_len
    return max(extra_context_len, 4 + 2 * int(get_spec().speculative_num_draft_tokens))


_WEIGHT_UPDATES = tuple(
    Hook(
        "sglang.srt.managers.scheduler_components.weight_updater."
        f"SchedulerWeightUpdaterManager.update_weights_from_{source}",
        weights.note_update,
        HookType.AFTER,
        "packed weights and the short draft head are copies; nothing else tells of an update",
    )
    for source in ("disk", "distributed", "tensor", "ipc")
)

HOOKS = (
    Hook(
        "sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len",
        _row_headroom,
        HookType.AFTER,
        "sizes the scheduler's request table; no algorithm method is asked",
    ),
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object",
        requests.refuse_unserved,
        HookType.AFTER,
        "an algorithm can refuse a request only in the scheduler, where a streaming client "
        "no longer gets HTTP 400",
        launcher_only=True,
    ),
    Hook(
        "sglang.srt.entrypoints.http_server.serve_generate_request",
        requests.refuse_stream,
        HookType.AROUND,
        "/generate answers 200 before it looks at a streaming request",
        launcher_only=True,
    ),
    Hook(
        "sglang.srt.server_args.ServerArgs.add_cli_args",
        flag.add_option,
        HookType.AROUND,
        "options are the fields of a sealed record; a plugin cannot declare one",
        launcher_only=True,
    ),
    Hook(
        "sglang.srt.server_args.ServerArgs.from_cli_args",
        flag.keep_option,
        HookType.AFTER,
        "carries the option's text to the scheduler processes",
        launcher_only=True,
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.internal_state."
        "SchedulerInternalStateController._add_speculative",
        state.add_dcut,
        HookType.AFTER,
        "/server_info asks only DSPARK for records of its own",
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.internal_state."
        "SchedulerInternalStateController._update_handlers",
        state.add_knobs,
        HookType.AFTER,
        "/set_internal_state has a fixed table of handlers",
    ),
    Hook(
        "sglang.srt.layers.sampler.Sampler._sample_from_probs",
        sampling.sample_by_kind,
        HookType.AROUND,
        "prefill draws the first token itself, and a seed's noise there depends on who else is "
        "in the batch",
    ),
    Hook(
        "sglang.srt.managers.schedule_batch.Req.update_finish_state",
        aborts.end_where_due,
        HookType.AROUND,
        "a request aborted in the step that ends it keeps what that step accepted past its end",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.init_request_receiver",
        passes.watch_arrivals,
        HookType.AFTER,
        "a worker cannot see that a request waits for the end of its step",
    ),
    Hook(
        "sglang.srt.mem_cache.allocation.get_last_loc",
        allocation.get_last_loc,
        HookType.REPLACE,
        "takes a Triton kernel unless the attention backend is named torch_native or ascend",
        cpu_only=True,
    ),
    Hook(
        "sglang.srt.batch_invariant_ops.enable_batch_invariant_mode",
        determinism.enable_batch_invariant_mode,
        HookType.REPLACE,
        "knows no CPU, and seeds are only honoured with the option that calls it",
        cpu_only=True,
    ),
    Hook(
        "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply",
        linear.apply_linear,
        HookType.AROUND,
        "packs weights for AMX only",
        cpu_only=True,
    ),
    Hook(
        "sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head",
        linear.compute_lm_head,
        HookType.AROUND,
        "packs weights for AMX only",
        cpu_only=True,
    ),
    *_WEIGHT_UPDATES,
    Hook(
        "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend",
        rivals.create_draft_backend,
        HookType.AROUND,
        "a local table of draft attention backends, to which nothing can be registered",
        cpu_only=True,
    ),
)


def active_hooks() -> tuple[Hook, ...]:
    """The hooks that apply in this process."""
    in_launcher = multiprocessing.parent_process() is None
    return tuple(
        hook
        for hook in HOOKS
        if (cpu_engine_enabled() or not hook.cpu_only) and (in_launcher or not hook.launcher_only)
    )


def register_hooks() -> None:
    """Hand the hooks to SGLang's registry, which applies them when all plugins are loaded."""
    for hook in active_hooks():
        HookRegistry.register(hook.target, hook.wrapper, hook.kind)


def missing_hooks() -> list[str]:
    """Targets of active hooks that SGLang has not wrapped."""
    return [hook.target for hook in active_hooks() if hook.target not in HookRegistry._patched]


def verify_hooks() -> None:
    """Check that SGLang applied every hook.

    Raises:
        RuntimeError: the targets that are not wrapped.
    """
    missing = missing_hooks()
    if missing:
        raise RuntimeError(
            f"SGLang did not apply these hooks of dcut_sglang: {', '.join(missing)}; "
            "see the log above for its reason, and run `dcut doctor`"
        )
