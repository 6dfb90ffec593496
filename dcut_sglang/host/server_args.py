"""Start-up: refuse what DCUT does not serve, and settle the arguments it derives."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang.srt.platforms import current_platform
from sglang.srt.speculative.dflash_utils import DFlashDraftConfig, parse_dflash_draft_config
from sglang.srt.utils.hf_transformers_utils import get_config

from dcut_sglang.host.cpu.activate import BACKEND_NAME
from dcut_sglang.host.flag import read_config

logger = logging.getLogger(__name__)

# As SGLang sets for DFLASH; plain decoding and DFLASH arms of a comparison must set the same.
DEFAULT_MAX_RUNNING_REQUESTS = 48


@dataclass(frozen=True)
class Refusal:
    """An option that DCUT does not serve: when it is asked for, and what to do about it."""

    asked_for: Callable[[Any], bool]
    sentence: str


def _is_on_cpu(server_args: Any) -> bool:
    return str(server_args.device).split(":")[0] == "cpu"


REFUSALS = (
    Refusal(
        lambda a: not _is_on_cpu(a),
        "DCUT has been run on CPUs only so far: start with --device cpu after "
        "`source scripts/cpu_env.sh`, or use --speculative-algorithm DFLASH on this device",
    ),
    Refusal(
        lambda a: not current_platform.is_out_of_tree(),
        "DCUT needs dcut_sglang's CPU platform, which is not active: "
        "run `source scripts/cpu_env.sh` first, and do not set SGLANG_PLATFORM",
    ),
    Refusal(
        lambda a: a.speculative_draft_model_path is None,
        "DCUT needs a DFlash drafter: pass --speculative-draft-model-path",
    ),
    Refusal(
        lambda a: a.attention_backend not in (None, BACKEND_NAME),
        "DCUT verifies another number of tokens for each request, which on a CPU only "
        f"--attention-backend {BACKEND_NAME} computes right: leave the option out",
    ),
    Refusal(
        lambda a: a.speculative_draft_attention_backend not in (None, BACKEND_NAME),
        "DCUT's drafter needs non-causal attention, which on a CPU only "
        f"{BACKEND_NAME} computes: leave out --speculative-draft-attention-backend",
    ),
    Refusal(
        lambda a: a.pp_size != 1, "DCUT does not serve pipeline parallelism: leave out --pp-size"
    ),
    Refusal(
        lambda a: a.dp_size != 1 or a.enable_dp_attention,
        "DCUT does not serve data parallelism inside one server: leave out --dp-size and "
        "--enable-dp-attention, and run one server per replica",
    ),
    Refusal(
        lambda a: bool(a.enable_lora or a.lora_paths),
        "DCUT does not serve LoRA (its packed rows break LoRA's equal-width assumption): "
        "leave out --enable-lora and --lora-paths",
    ),
    Refusal(
        lambda a: a.disaggregation_mode != "null",
        "DCUT does not serve prefill/decode disaggregation: leave out --disaggregation-mode",
    ),
    Refusal(
        lambda a: a.tokenizer_worker_num > 1,
        "DCUT needs one tokenizer process (further ones do not load plugins): "
        "leave out --tokenizer-worker-num",
    ),
    Refusal(
        lambda a: bool(a.enable_mixed_chunk),
        "DCUT does not mix prefill chunks into decode batches: leave out --enable-mixed-chunk",
    ),
    Refusal(
        lambda a: bool(a.enable_two_batch_overlap),
        "DCUT does not split batches in two: leave out --enable-two-batch-overlap",
    ),
    Refusal(
        lambda a: bool(a.speculative_adaptive),
        "DCUT adapts by itself: leave out --speculative-adaptive",
    ),
    Refusal(
        lambda a: a.speculative_draft_window_size is not None,
        "DCUT does not serve a windowed drafter cache yet: "
        "leave out --speculative-draft-window-size",
    ),
    Refusal(
        lambda a: bool(a.enable_return_hidden_states or a.return_hidden_states_mode),
        "DCUT does not return hidden states: leave out --enable-return-hidden-states and "
        "--return-hidden-states-mode",
    ),
    Refusal(
        lambda a: a.speculative_accept_threshold_single < 1.0
        or a.speculative_accept_threshold_acc < 1.0,
        "DCUT accepts only what the target itself would emit: leave out "
        "--speculative-accept-threshold-single and --speculative-accept-threshold-acc",
    ),
    Refusal(
        lambda a: bool(a.enable_unified_memory),
        "DCUT does not serve the unified memory pool: leave out --enable-unified-memory",
    ),
    Refusal(
        lambda a: bool(a.disable_cuda_graph_padding),
        "DCUT needs padded graphs: leave out --disable-cuda-graph-padding",
    ),
    Refusal(
        lambda a: float(os.environ.get("SGLANG_SIMULATE_ACC_LEN", "-1")) > 0,
        "SGLANG_SIMULATE_ACC_LEN would commit tokens that were never verified: unset it",
    ),
)


def check(server_args: Any) -> None:
    """Refuse unsupported options and drafters.

    Args:
        server_args: SGLang's resolved view of the command line.

    Raises:
        ValueError: one sentence per refused option, each with the way out.
    """
    sentences = [refusal.sentence for refusal in REFUSALS if refusal.asked_for(server_args)]
    if sentences:
        raise ValueError(". ".join(sentences) + ".")
    logger.info("DCUT configuration: %s", json.dumps(read_config(server_args).to_dict()))
    draft_config = load_draft_config(server_args)
    target = _load_config("target model", server_args.model_path, server_args).get_text_config()
    check_target(target, server_args.model_path)
    check_drafter(draft_config, target=target, drafter=server_args.speculative_draft_model_path)
    resolve_block_size(server_args, draft_config)


def settle(server_args: Any) -> None:
    """Fill in what DFLASH derives from the command line, for DCUT's name.

    SGLang's own ``_handle_dflash`` does the same for DFLASH; these fields size its buffers.
    Writes go through SGLang's stand-in object, which declares them.
    """
    server_args.speculative_num_steps = 1
    server_args.speculative_eagle_topk = 1
    server_args.speculative_num_draft_tokens = resolve_block_size(
        server_args, load_draft_config(server_args)
    )
    if server_args.speculative_draft_attention_backend is None:
        server_args.speculative_draft_attention_backend = (
            current_platform.get_default_speculative_draft_attention_backend("DFLASH")
        )
    if _is_on_cpu(server_args) and not read_config(server_args).cpu_overlap:
        # As SGLang does for EAGLE and NGRAM on a CPU.
        server_args.disable_overlap_schedule = True
    if server_args.max_running_requests is None:
        server_args.max_running_requests = DEFAULT_MAX_RUNNING_REQUESTS
        logger.info(
            "DCUT: --max-running-requests is not set, using %d", DEFAULT_MAX_RUNNING_REQUESTS
        )


def load_draft_config(server_args: Any) -> Any:
    """The drafter's Hugging Face config.

    Raises:
        ValueError: it cannot be read.
    """
    return _load_config("drafter", server_args.speculative_draft_model_path, server_args)


def resolve_block_size(server_args: Any, draft_hf_config: Any) -> int:
    """D: from the command line, else from the checkpoint.

    Raises:
        ValueError: conflicting options, or a D that the checkpoint does not list.
    """
    parsed = parse_dflash_draft_config(draft_hf_config=draft_hf_config)
    own = parsed.resolve_block_size(default=16)
    dflash_config = getattr(draft_hf_config, "dflash_config", None) or {}
    listed = sorted({own, *dflash_config.get("block_sizes", ())})
    options = {
        name: value
        for name, value in (
            ("--speculative-num-draft-tokens", server_args.speculative_num_draft_tokens),
            ("--speculative-dflash-block-size", server_args.speculative_dflash_block_size),
        )
        if value is not None
    }
    if len(set(options.values())) > 1:
        raise ValueError(f"DCUT: {' and '.join(options)} differ: {options}; give one of them.")
    block_size = next(iter(options.values()), own)
    if block_size not in listed or block_size < 2:
        raise ValueError(
            f"DCUT: the drafter was trained for block sizes {listed}, got {block_size}; "
            f"leave out {' and '.join(options) or 'the block size'} or give one of these."
        )
    return int(block_size)


def check_target(target: Any, model: str) -> None:
    """Refuse targets whose layers carry state from row to row or assume equal rows.

    Raises:
        ValueError: naming what the config says.
    """
    layer_types = set(getattr(target, "layer_types", None) or ())
    stateful = sorted(layer_types - {"full_attention", "sliding_attention"})
    if stateful or getattr(target, "ssm_cfg", None) or getattr(target, "mamba_d_state", None):
        raise ValueError(
            f"DCUT: {model} has layers with a recurrent state ({', '.join(stateful) or 'mamba'}), "
            "which are not verified at different lengths yet; use --speculative-algorithm DFLASH."
        )


def check_drafter(draft_hf_config: Any, *, target: Any, drafter: str) -> None:
    """Refuse a checkpoint that is no plain DFlash drafter, or one made for another target.

    Raises:
        ValueError: what does not fit, expected and found.
    """
    architectures = list(getattr(draft_hf_config, "architectures", None) or [])
    if "DFlashDraftModel" not in architectures:
        raise ValueError(
            f"DCUT: {drafter} is not a DFlash drafter (its architectures are {architectures}, "
            "expected DFlashDraftModel); pass one with --speculative-draft-model-path."
        )
    parsed: DFlashDraftConfig = parse_dflash_draft_config(draft_hf_config=draft_hf_config)
    if parsed.is_domino or parsed.selector_rank or getattr(draft_hf_config, "lilicorr", None):
        raise ValueError(
            f"DCUT: {drafter} has a Domino, selector or LiLiCorr head, whose drafts are sampled; "
            "pruning by their confidence would bias the output. Use a plain DFlash drafter."
        )
    mismatches = [
        f"{what} {found} (target: {expected})"
        for what, found, expected in (
            ("hidden size", draft_hf_config.hidden_size, target.hidden_size),
            ("vocabulary", draft_hf_config.vocab_size, target.vocab_size),
            ("number of target layers", parsed.num_target_layers, target.num_hidden_layers),
        )
        if found is not None and found != expected
    ]
    if mismatches:
        raise ValueError(
            f"DCUT: the drafter {drafter} was made for another target: {'; '.join(mismatches)}. "
            "Pass the drafter that was trained for --model-path."
        )
    parsed.resolve_target_layer_ids(target_num_layers=target.num_hidden_layers)


def _load_config(what: str, path: str, server_args: Any) -> Any:
    try:
        return get_config(
            path,
            trust_remote_code=server_args.trust_remote_code,
            model_override_args=(
                json.loads(server_args.json_model_override_args) if what == "drafter" else None
            ),
        )
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"DCUT: cannot read the config of the {what} {path} ({error}); it must be a folder "
            "with a config.json, or a model id that can be downloaded."
        ) from error
