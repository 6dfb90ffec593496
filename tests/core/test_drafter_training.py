"""The drafter module, its checkpoint, its loss, its offline evaluation and the synthetic text."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dcut_sglang.training.blocks import block_loss, block_token_ids, draft_weights
from dcut_sglang.training.drafter import Drafter, DrafterConfig, load, save
from dcut_sglang.training.evaluate import drafter_proposer, walk
from dcut_sglang.training.fit import FitConfig, fit
from dcut_sglang.training.muon import orthogonalize
from dcut_sglang.training.responses import Response
from dcut_sglang.training.synthetic import (
    KINDS,
    NOISE_CYCLE,
    SYLLABLES,
    documents,
    split_of,
)


def small_config(**changes: object) -> DrafterConfig:
    values: dict[str, object] = {
        "hidden_size": 24,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 10,
        "ffn_size": 40,
        "num_layers": 2,
        "vocab_size": 50,
        "mask_token_id": 3,
        "target_layer_ids": (0, 2),
        "num_target_layers": 4,
        "rope_theta": 500.0,
        "rms_norm_eps": 1e-3,
    }
    return DrafterConfig(**(values | changes))  # type: ignore[arg-type]


def random_drafter(config: DrafterConfig) -> Drafter:
    """Norm weights are drawn too: at one they would hide a norm in the wrong place."""
    drafter = Drafter(config)
    for parameter in drafter.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return drafter


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt(sum(v * v for v in x) / len(x) + eps) * weight


def rotate(x: Tensor, position: int, theta: float) -> Tensor:
    half = len(x) // 2
    out = x.clone()
    for i in range(half):
        angle = position / theta ** (i / half)
        cos, sin = math.cos(angle), math.sin(angle)
        out[i] = x[i] * cos - x[i + half] * sin
        out[i + half] = x[i + half] * cos + x[i] * sin
    return out


def naive_block(drafter: Drafter, features: Tensor, embeds: Tensor, anchor: int) -> Tensor:
    """One block, one head, one query at a time. features: [S, F]; embeds: [D, H]."""
    c, w = drafter.config, dict(drafter.named_parameters())
    fused = [
        norm(w["fc.weight"] @ f, w["hidden_norm.weight"], c.rms_norm_eps) for f in features[:anchor]
    ]
    x = list(embeds)
    for n in range(c.num_layers):
        p = f"layers.{n}."

        def heads(kind: str, vector: Tensor, prefix: str = p) -> Tensor:
            return (w[f"{prefix}self_attn.{kind}_proj.weight"] @ vector).view(-1, c.head_dim)

        def placed(kind: str, vector: Tensor, position: int, prefix: str = p) -> list[Tensor]:
            weight = w[f"{prefix}self_attn.{kind}_norm.weight"]
            return [
                rotate(norm(head, weight, c.rms_norm_eps), position, c.rope_theta)
                for head in heads(kind, vector)
            ]

        inputs = [norm(v, w[p + "input_layernorm.weight"], c.rms_norm_eps) for v in x]
        keys = [placed("k", v, i) for i, v in enumerate(fused)]
        keys += [placed("k", v, anchor + i) for i, v in enumerate(inputs)]
        values = [heads("v", v) for v in fused + inputs]
        for i, v in enumerate(inputs):
            out = []
            for head, query in enumerate(placed("q", v, anchor + i)):
                group = head // (c.num_heads // c.num_kv_heads)
                scores = torch.stack([query @ k[group] for k in keys]) / math.sqrt(c.head_dim)
                shares = scores.softmax(0)
                out.append(sum(s * u[group] for s, u in zip(shares, values, strict=True)))
            x[i] = x[i] + w[p + "self_attn.o_proj.weight"] @ torch.cat(out)
            y = norm(x[i], w[p + "post_attention_layernorm.weight"], c.rms_norm_eps)
            gate = w[p + "mlp.gate_proj.weight"] @ y
            up = w[p + "mlp.up_proj.weight"] @ y
            x[i] = x[i] + w[p + "mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)
    return torch.stack([norm(v, w["norm.weight"], c.rms_norm_eps) for v in x])


@pytest.mark.parametrize(
    ("changes", "block_size"),
    [
        ({}, 5),
        ({"num_kv_heads": 4, "num_layers": 1}, 2),
        ({"num_heads": 3, "num_kv_heads": 1, "head_dim": 6, "target_layer_ids": (1,)}, 7),
    ],
)
def test_block_attention_equals_naive_reference(
    changes: dict[str, object], block_size: int
) -> None:
    torch.manual_seed(0)
    config = small_config(**changes)
    drafter = random_drafter(config).double()
    features = torch.randn(2, 9, config.feature_size, dtype=torch.float64)
    anchors = torch.tensor([[4, 8, 1], [2, 2, 9]])
    embeds = torch.randn(2, 3, block_size, config.hidden_size, dtype=torch.float64)
    with torch.no_grad():
        got = drafter(embeds, anchors, drafter.context(features))
        for row, block in itertools.product(range(2), range(3)):
            expected = naive_block(
                drafter, features[row], embeds[row, block], int(anchors[row, block])
            )
            # Rotation angles are float32 in the module, as in servers.
            torch.testing.assert_close(got[row, block], expected, rtol=1e-4, atol=1e-5)


def test_save_and_load_round_trip(tmp_path: Path) -> None:
    drafter = random_drafter(small_config())
    save(drafter, tmp_path)
    again = load(tmp_path)
    assert again.config == drafter.config
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    for (name, value), (other_name, other) in zip(
        drafter.state_dict().items(), again.state_dict().items(), strict=True
    ):
        assert name == other_name
        assert torch.equal(value, other)
    data = json.loads((tmp_path / "config.json").read_text())
    assert data["architectures"] == ["DFlashDraftModel"]
    assert data["block_size"] == 16
    assert data["dflash_config"]["block_sizes"] == [4, 8, 16]


def test_checkpoint_names_are_those_of_the_format(tmp_path: Path) -> None:
    names = set(random_drafter(small_config(num_layers=1)).state_dict())
    layer = [f"self_attn.{x}_proj" for x in "qkvo"] + ["self_attn.q_norm", "self_attn.k_norm"]
    layer += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    layer += ["input_layernorm", "post_attention_layernorm"]
    expected = {f"layers.0.{x}.weight" for x in layer}
    assert names == expected | {"fc.weight", "hidden_norm.weight", "norm.weight"}


def test_loading_refuses_missing_weights(tmp_path: Path) -> None:
    save(random_drafter(small_config(num_layers=1)), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 2}))
    with pytest.raises(RuntimeError, match="Missing key"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_layer_ids": (0, 3)}, "must lie in 0..2"),
        ({"target_layer_ids": (2, 0)}, "ascending"),
        ({"num_kv_heads": 3}, "multiple"),
        ({"mask_token_id": 50}, "mask_token_id"),
        ({"block_sizes": (1, 8)}, "block_sizes"),
    ],
)
def test_config_refuses_nonsense(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small_config(**changes)


def test_loss_weights_fall_along_the_block() -> None:
    torch.testing.assert_close(
        draft_weights(3, 5.0), torch.tensor([1.0, math.exp(-0.2), math.exp(-0.4)])
    )
    logits = torch.randn(2, 3, 7)
    labels = torch.randint(7, (2, 3))
    valid = torch.tensor([[True, True, True], [True, False, False]])
    nats = -logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    w = [1.0, math.exp(-0.5), math.exp(-1.0)]
    expected = (sum(w[k] * nats[0, k] for k in range(3)) + nats[1, 0]) / (sum(w) + 1)
    torch.testing.assert_close(block_loss(logits, labels, valid, gamma=2.0), expected)
    assert block_loss(logits, labels, torch.zeros_like(valid), gamma=2.0) == 0


def test_block_starts_with_the_anchor() -> None:
    ids = torch.arange(10, 20)[None]
    blocks = block_token_ids(ids, torch.tensor([[2, 5]]), 4, mask_token_id=3)
    assert blocks.tolist() == [[[12, 3, 3, 3], [15, 3, 3, 3]]]


def toy_response(num_prompt: int, num_new: int, ends: bool) -> Response:
    ids = torch.randint(4, 50, (num_prompt + num_new,))
    return Response(ids, torch.zeros(len(ids), 48), num_prompt, ends)


@pytest.mark.parametrize("block_size", [4, 16])
def test_walk_of_a_perfect_drafter_takes_whole_blocks(block_size: int) -> None:
    texts = [toy_response(3, 1 + 5 * block_size, False), toy_response(7, 1 + block_size, True)]

    def perfect(requests: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
        drafts = [
            texts[i].token_ids[a + 1 : a + block_size]
            for i, a in zip(requests.tolist(), anchors.tolist(), strict=True)
        ]
        return torch.stack(drafts), torch.ones(len(drafts), block_size - 1)

    result = walk(texts, perfect, block_size)
    assert result.accept_length() == block_size
    assert result.accept_length([1]) == block_size
    assert result.reach(block_size - 1) == 1
    assert sorted(zip(result.request.tolist(), result.offset.tolist(), strict=True)) == [
        *((0, i * block_size) for i in range(5)),
        (1, 0),
    ]


def test_walk_stops_at_the_first_wrong_draft_and_at_the_end() -> None:
    texts = [toy_response(2, 8, True), toy_response(2, 8, False)]

    def third_is_wrong(requests: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
        places = (anchors[:, None] + torch.arange(1, 6)).clamp(max=9)
        drafts = torch.stack([texts[i].token_ids for i in requests.tolist()]).gather(1, places)
        drafts[:, 2] = 0
        return drafts, torch.ones(drafts.shape)

    result = walk(texts, third_is_wrong, block_size=6)
    for request in range(2):
        mine = result.request == request
        # Eight tokens: the first anchor and steps of three, three and the last one alone.
        assert result.offset[mine].tolist() == [0, 3, 6]
        assert result.accepts[mine].tolist() == [2, 2, 1]
        assert result.num_inside[mine].tolist() == [5, 4, 1]
    assert result.is_whole[result.request == 0].tolist() == [True, True, True]
    assert result.is_whole[result.request == 1].tolist() == [True, False, False]


def test_fit_learns_to_repeat_the_anchor() -> None:
    torch.manual_seed(0)
    config = small_config(num_layers=1)
    embed, head = 0.1 * torch.randn(50, 24), torch.randn(50, 24)
    texts = []
    for token in range(10, 22):
        ids = torch.full((40,), token)
        # The anchor alone tells the rest; features carry nothing.
        texts.append(Response(ids, torch.zeros(40, config.feature_size), 4, False))
    drafter = Drafter(config)
    messages: list[str] = []
    settings = FitConfig(num_steps=150, num_block_tokens=64, lr=1e-2)
    fit(drafter, embed, head, texts, settings, messages.append)
    result = walk(texts, drafter_proposer(drafter, embed, head, texts, 8), 8)
    assert result.accept_length() > 7.5
    assert result.confidence.shape == (len(result.accepts), 7)
    assert messages[-1].startswith("drafter step 149/150")


def test_muon_makes_singular_values_near_one() -> None:
    torch.manual_seed(0)
    for shape in ((20, 50), (50, 20)):
        values = torch.linalg.svdvals(orthogonalize(torch.randn(shape)))
        assert ((values > 0.5) & (values < 1.3)).all()


def test_same_seed_gives_identical_text() -> None:
    def take(seed: int, split: str) -> list[object]:
        return list(itertools.islice(documents(seed, split), 100))

    assert take(5, "train") == take(5, "train")
    assert take(5, "train") != take(6, "train")
    train, heldout = take(5, "train"), take(5, "heldout")
    assert {d.kind for d in train} == set(KINDS)
    assert all(split_of(d.prompt) == "train" for d in train)
    assert all(split_of(d.prompt) == "heldout" for d in heldout)


def test_documents_refuse_unknown_names() -> None:
    with pytest.raises(ValueError, match="split"):
        next(documents(0, "test"))
    with pytest.raises(ValueError, match="kinds"):
        next(documents(0, "train", {"poem": 1.0}))


def test_noise_cycle_contains_each_pair_once() -> None:
    pairs = set(zip(NOISE_CYCLE, (*NOISE_CYCLE[1:], NOISE_CYCLE[0]), strict=True))
    assert len(NOISE_CYCLE) == len(pairs) == len(SYLLABLES) ** 2
