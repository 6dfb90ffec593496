"""The EAGLE-3 head: its arithmetic, its checkpoint, its training and the tool."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_drafter_training import norm, rotate
from torch import Tensor

from dcut_sglang.training.eagle3 import Eagle3Config, Eagle3Head, load, save
from dcut_sglang.training.eagle3_fit import (
    Eagle3Fitter,
    frequent_tokens,
    head_proposer,
)
from dcut_sglang.training.evaluate import walk
from dcut_sglang.training.fit import FitConfig
from dcut_sglang.training.pipeline import RunSettings, fix_prompts
from dcut_sglang.training.prompts import Prompt
from dcut_sglang.training.responses import Response, collect_responses
from dcut_sglang.training.run import identity_of, train
from dcut_sglang.training.store import ResponseStore
from dcut_sglang.training.target import fingerprint, load_target, load_tokenizer

ROOT = Path(__file__).resolve().parents[2]
VOCAB = 50


def small_config(**changes: object) -> Eagle3Config:
    values: dict[str, object] = {
        "hidden_size": 24,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 10,
        "ffn_size": 40,
        "vocab_size": VOCAB,
        "draft_vocab_size": 30,
        "target_layer_ids": (0, 1, 3),
        "num_target_layers": 5,
        "num_unroll": 4,
        "rope_theta": 500.0,
        "rms_norm_eps": 1e-3,
    }
    return Eagle3Config(**(values | changes))  # type: ignore[arg-type]


def small_head(config: Eagle3Config) -> Eagle3Head:
    """Norm weights are drawn too: at one they would hide a norm in the wrong place."""
    torch.manual_seed(2)
    head = Eagle3Head(config, torch.randperm(VOCAB)[: config.draft_vocab_size].sort().values)
    for parameter in head.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return head


def naive_chain(head: Eagle3Head, features: Tensor, embeds: Tensor, last: int) -> list[Tensor]:
    """One row, one query head at a time; `embeds[p]` belongs to token p + 1.

    Rows up to `last` read the target's features, the others the state of the row before them.
    """
    c, w = head.config, dict(head.named_parameters())
    p = "layers.0."
    keys: list[Tensor] = []
    values: list[Tensor] = []
    state, outputs = torch.zeros(0), []
    for row in range(len(embeds)):
        if row <= last:
            state = w["fc.weight"] @ features[row]
        x = torch.cat(
            [
                norm(embeds[row], w[p + "input_layernorm.weight"], c.rms_norm_eps),
                norm(state, w[p + "hidden_norm.weight"], c.rms_norm_eps),
            ]
        )
        keys.append((w[p + "self_attn.k_proj.weight"] @ x).view(c.num_kv_heads, -1))
        values.append((w[p + "self_attn.v_proj.weight"] @ x).view(c.num_kv_heads, -1))
        if row < last:
            continue
        query = (w[p + "self_attn.q_proj.weight"] @ x).view(c.num_heads, -1)
        out = []
        for h in range(c.num_heads):
            kv = h * c.num_kv_heads // c.num_heads
            turned = rotate(query[h], row, c.rope_theta)
            scores = torch.stack(
                [turned @ rotate(k[kv], at, c.rope_theta) for at, k in enumerate(keys)]
            )
            shares = (scores / c.head_dim**0.5).softmax(0)
            out.append(sum(s * v[kv] for s, v in zip(shares, values, strict=True)))
        state = state + w[p + "self_attn.o_proj.weight"] @ torch.cat(out)
        z = norm(state, w[p + "post_attention_layernorm.weight"], c.rms_norm_eps)
        gate = torch.nn.functional.silu(w[p + "mlp.gate_proj.weight"] @ z)
        state = state + w[p + "mlp.down_proj.weight"] @ (gate * (w[p + "mlp.up_proj.weight"] @ z))
        outputs.append(norm(state, w["norm.weight"], c.rms_norm_eps))
    return outputs


@torch.no_grad()
def test_chains_equal_the_definition() -> None:
    head = small_head(small_config())
    features, embeds = torch.randn(2, 9, 72), torch.randn(2, 9, 24)
    last = torch.tensor([[0, 3, 5], [4, 1, 5]])
    chains = head.chains(head.context(features[:, :6], embeds[:, :6]), last)
    for step in range(3):
        places = last + step
        found = chains.step(embeds.gather(1, places[:, :, None].expand(-1, -1, 24)))
        for b, n in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 2)):
            row = int(last[b, n])
            expected = naive_chain(head, features[b], embeds[b, : row + step + 1], row)[-1]
            torch.testing.assert_close(found[b, n], expected, atol=1e-4, rtol=1e-3)


def test_checkpoint_round_trip(tmp_path: Path) -> None:
    head = small_head(small_config(target_fingerprint={"shape": [1]}))
    save(head, tmp_path)
    again = load(tmp_path)
    assert again.config == head.config
    for name, value in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    stored, ids = load_file(tmp_path / "model.safetensors"), head.draft_token_ids
    assert torch.equal(stored["d2t"] + torch.arange(30), ids)
    assert torch.equal(stored["t2d"].nonzero()[:, 0], ids)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 3]


@pytest.mark.parametrize(
    ("change", "phrase"),
    [
        ({"target_layer_ids": (0, 1)}, "three ascending"),
        ({"target_layer_ids": (0, 1, 4)}, "of 0..3"),
        ({"draft_vocab_size": 51}, "1..50"),
        ({"num_kv_heads": 3}, "multiple"),
        ({"num_unroll": 0}, "at least 1"),
    ],
)
def test_impossible_heads_are_refused(change: dict[str, Any], phrase: str) -> None:
    with pytest.raises(ValueError, match=phrase):
        small_config(**change)


def toy_responses() -> tuple[Tensor, list[Response]]:
    """Texts that count modulo 20, features that tell the token: an embedding, and responses."""
    generator = torch.Generator().manual_seed(6)
    embed = torch.randn(VOCAB, 24, generator=generator)
    texts = [(torch.arange(24) * (1 + i % 2) + i) % 20 for i in range(12)]
    return embed, [Response(t, embed[t].repeat(1, 3), 4, ends=False) for t in texts]


def toy_fitter(num_steps: int = 6) -> Eagle3Fitter:
    embed, responses = toy_responses()
    ids = frequent_tokens(responses, VOCAB, 30)
    torch.manual_seed(0)
    head = Eagle3Head(small_config(), ids)
    config = FitConfig(num_steps, 6, num_block_tokens=16, lr=5e-3, num_extra_tokens=4)
    return Eagle3Fitter(head, embed, responses, config)


def test_resumed_training_equals_uninterrupted(tmp_path: Path) -> None:
    whole = toy_fitter()
    for _ in range(6):
        whole.step()
    identity = identity_of(whole._head, whole._config, [1, 2])

    def call(num_steps: int) -> Eagle3Fitter:
        fitter = toy_fitter()
        train(fitter, num_steps, tmp_path / "state.pt", identity, None, lambda _: None)
        return fitter

    call(3)
    resumed = call(6)
    assert resumed.num_done == 6
    assert resumed.average_loss == whole.average_loss
    for name, value in whole.state()["drafter"].items():
        assert torch.equal(resumed.state()["drafter"][name], value), name


def test_training_teaches_whole_chains() -> None:
    fitter = toy_fitter(150)
    before = fitter._head.lm_head.weight.clone()
    for _ in range(150):
        fitter.step()
    assert torch.equal(fitter._head.lm_head.weight, before)  # frozen
    embed, responses = toy_responses()
    steps = walk(responses, head_proposer(fitter._head, embed, responses, 4), 5)
    assert steps.accept_length() > 4
    assert steps.confidence.min() >= 0 and steps.confidence.max() <= 1


def test_frequent_tokens_come_first_and_small_ids_fill_up() -> None:
    ids = torch.tensor([9, 40, 40, 7, 7, 7, 8])
    responses = [Response(ids, torch.zeros(7, 3), 1, ends=True)]
    assert frequent_tokens(responses, VOCAB, 2).tolist() == [7, 40]
    assert frequent_tokens(responses, VOCAB, 5).tolist() == [0, 1, 7, 8, 40]


def test_the_tool_from_responses_to_a_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("transformers.models.llama.modeling_llama", exc_type=ImportError)
    tiny, data, out = ROOT / "models/tiny/target", tmp_path / "data", tmp_path / "out"
    target, tokenizer = load_target(tiny), load_tokenizer(tiny)
    texts = [e["prompt"] for e in json.loads((ROOT / "models/tiny/prompts.json").read_text())[::7]]
    prompts = [
        Prompt("chat" if i % 2 else "sql", "train" if i % 3 else "prompt", text)
        for i, text in enumerate(texts)
    ]
    RunSettings(fingerprint(target), 0, len(texts), 24, (0, 1, 2)).bind(data)
    fix_prompts(data, lambda: prompts)
    store = ResponseStore(data / "features")
    encoded = [tokenizer.encode(text) for text in texts]
    responses = collect_responses(target, encoded, (0, 1, 2), 80, tokenizer.eos_token_id)
    for index, response in enumerate(responses):
        store.add(index, response)
    store.flush()

    def tool(*args: str) -> subprocess.CompletedProcess[str]:
        folders = ["--target", str(tiny), "--data", str(data), "--out", str(out)]
        command = [sys.executable, str(ROOT / "scripts/train_eagle3.py"), *folders, *args]
        return subprocess.run(command, capture_output=True, text=True)

    sizes = ["--draft-vocab", "300", "--unroll", "3", "--sequences", "4", "--block-tokens", "12"]
    work = ["--workdir", str(tmp_path / "work"), "--target-layers", "0,1,2", *sizes]
    done = tool("--steps", "4", *work)
    assert done.returncode == 1, done.stderr  # four steps make no rival
    summary = json.loads(done.stdout.splitlines()[-1])
    assert set(summary["by_kind"]["3"]) == {"chat", "sql"}
    assert load(out).config.draft_vocab_size == 300
    card = (out / "README.md").read_text()
    assert "less than the 2.0" in card and "| sql |" in card
    again = json.loads(tool("--stages", "eval", *work).stdout.splitlines()[-1])
    assert again == summary
    missing = tool("--steps", "4", *work, "--target-layers", "0,1,5")
    assert "has layers [0, 1, 2], not [5]" in missing.stderr
