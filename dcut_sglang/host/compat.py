"""Which SGLang versions DCUT runs on, and whether the installed one is as expected.

The versions are exact: a seam that moved would not fail loudly by itself. Each seam that DCUT
overrides, calls or hooks is listed with the parameters it was written for.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

SUPPORTED_VERSIONS = ("0.5.23",)


@dataclass(frozen=True)
class Problem:
    """Why DCUT cannot run here. ``fatal``: not even its name can be registered."""

    sentence: str
    fatal: bool = False


@dataclass(frozen=True)
class Seam:
    """A function of SGLang that DCUT leans on, and its parameter names in order."""

    path: str
    parameters: tuple[str, ...]

    def problem(self) -> str | None:
        """A sentence when the function is missing or takes other parameters."""
        module_path, _, qualname = self.path.partition(":")
        try:
            target: object = importlib.import_module(module_path)
            for name in qualname.split("."):
                target = getattr(target, name)
        except (ImportError, AttributeError) as error:
            return f"{self.path} is missing ({error})"
        assert callable(target)
        found = tuple(inspect.signature(target).parameters)
        if found != self.parameters:
            return f"{self.path} takes {found}, expected {self.parameters}"
        return None


_SELF = ("self",)
SEAMS = (
    # subclassed
    Seam(
        "sglang.srt.speculative.dflash_worker_v2:DFlashWorkerV2.__init__",
        (*_SELF, "server_args", "gpu_id", "nccl_port", "target_worker"),
    ),
    Seam(
        "sglang.srt.speculative.dflash_worker_v2:DFlashWorkerV2.forward_batch_generation",
        (*_SELF, "batch", "on_publish", "grammar_barrier", "pp_proxy_tensors"),
    ),
    Seam(
        "sglang.srt.speculative.dflash_worker_v2:DFlashWorkerV2._defer_target_verify_gather",
        _SELF,
    ),
    Seam(
        "sglang.srt.speculative.spec_registry:CustomSpecAlgo.__init__",
        (*_SELF, "name", "factory", "supports_overlap", "validate_server_args"),
    ),
    # called
    Seam("sglang.srt.layers.dp_attention:get_dp_tp_group", ()),
    Seam(
        "sglang.srt.speculative.spec_tp_sync:SpecTpSync.sync",
        (*_SELF, "site", "values"),
    ),
    Seam(
        "sglang.srt.speculative.dflash_worker_v2:"
        "DFlashWorkerV2._append_target_hidden_to_draft_kv_by_loc",
        (
            *_SELF,
            "target_hidden",
            "cache_loc",
            "positions",
            "cache_loc_2d",
            "commit_lens",
            "extend_lens",
        ),
    ),
    Seam(
        "sglang.srt.speculative.dflash_info:DFlashVerifyInput.prepare_for_verify",
        (*_SELF, "batch", "target_worker", "defer_metadata_init"),
    ),
    Seam(
        "sglang.srt.speculative.ragged_verify:RaggedVerifyLayout.from_verify_lens_device",
        ("verify_lens", "graph_num_tokens"),
    ),
    Seam(
        "sglang.srt.speculative.draft_worker_common:make_draft_input_v2",
        ("bonus_tokens", "new_seq_lens"),
    ),
    Seam(
        "sglang.srt.speculative.draft_worker_common:make_draft_block_spec_info",
        ("draft_token_num", "device"),
    ),
    Seam(
        "sglang.srt.mem_cache.kv_loc_plan:KVLocPlan.write_ids",
        (*_SELF, "reader", "kind", "cols"),
    ),
    Seam(
        "sglang.srt.speculative.spec_utils:build_grammar_vocab_mask",
        ("reqs", "tree", "sampling_info", "device", "barrier"),
    ),
    Seam("sglang.srt.speculative.spec_utils:GrammarTree.from_linear_chain", ("verify_ids_2d",)),
    # called and hooked
    Seam(
        "sglang.srt.layers.sampler:Sampler._sample_from_probs",
        (*_SELF, "probs", "sampling_info", "positions", "simple_sampling_case"),
    ),
    # hooked
    Seam("sglang.srt.server_args:ServerArgs.add_cli_args", ("parser",)),
    Seam("sglang.srt.server_args:ServerArgs.from_cli_args", ("args",)),
    Seam("sglang.srt.mem_cache.allocation_sizing:get_req_to_token_extra_context_len", ()),
    Seam(
        "sglang.srt.managers.tokenizer_manager:TokenizerManager._create_tokenized_object",
        (
            *_SELF,
            "obj",
            "input_text",
            "input_ids",
            "input_embeds",
            "mm_inputs",
            "token_type_ids",
        ),
    ),
    Seam("sglang.srt.entrypoints.http_server:serve_generate_request", ("obj", "request")),
    Seam(
        "sglang.srt.managers.scheduler_components.internal_state:"
        "SchedulerInternalStateController._add_speculative",
        (*_SELF, "state"),
    ),
    Seam(
        "sglang.srt.managers.scheduler_components.internal_state:"
        "SchedulerInternalStateController._update_handlers",
        _SELF,
    ),
    Seam(
        "sglang.srt.managers.schedule_batch:Req.update_finish_state",
        (*_SELF, "new_accepted_len"),
    ),
    Seam("sglang.srt.managers.scheduler:Scheduler.init_request_receiver", _SELF),
    Seam(
        "sglang.srt.mem_cache.allocation:get_last_loc",
        ("req_to_token", "req_pool_indices_tensor", "prefix_lens_tensor"),
    ),
    Seam("sglang.srt.batch_invariant_ops:enable_batch_invariant_mode", ("enable_bmm",)),
    Seam(
        "sglang.srt.layers.quantization.unquant:UnquantizedLinearMethod.apply",
        (*_SELF, "layer", "x", "bias"),
    ),
    Seam(
        "sglang.srt.layers.logits_processor:LogitsProcessor._compute_lm_head",
        (*_SELF, "hidden_states", "lm_head", "embedding_bias", "out"),
    ),
    *(
        Seam(
            "sglang.srt.managers.scheduler_components.weight_updater:"
            f"SchedulerWeightUpdaterManager.update_weights_from_{source}",
            (*_SELF, "recv_req"),
        )
        for source in ("disk", "distributed", "tensor", "ipc")
    ),
    Seam(
        "sglang.srt.speculative.draft_utils:DraftBackendFactory._create_backend",
        (*_SELF, "backend_name", "backend_map", "error_template", "stamps_children"),
    ),
)


def installed_version() -> str | None:
    """Version of the installed sglang distribution, or None."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return None


def problems() -> list[Problem]:
    """Everything about the installed SGLang that keeps DCUT from running; empty when fine.

    Imports the SGLang modules it checks.
    """
    found = installed_version()
    supported = ", ".join(SUPPORTED_VERSIONS)
    if found is None:
        return [Problem(f"sglang is not installed; run: pip install sglang=={supported}", True)]
    if found not in SUPPORTED_VERSIONS:
        fatal = Seam(
            "sglang.srt.speculative.spec_registry:CustomSpecAlgo.__init__",
            (*_SELF, "name", "factory", "supports_overlap", "validate_server_args"),
        ).problem()
        return [
            Problem(
                f"this dcut_sglang runs on SGLang {supported}, found {found}; "
                f"run: pip install sglang=={SUPPORTED_VERSIONS[-1]}, or leave out "
                "--speculative-algorithm DCUT",
                fatal is not None,
            )
        ]
    sentences = [sentence for seam in SEAMS if (sentence := seam.problem())]
    return [
        Problem(
            f"SGLang {found} is not as released: {sentence}; "
            f"reinstall it: pip install --force-reinstall --no-deps sglang=={found}"
        )
        for sentence in sentences
    ]
