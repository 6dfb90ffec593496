"""DCutConfig: every value checked, unknown keys refused, inline JSON or a file."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest

from dcut_sglang.config import ConfigError, DCutConfig

EVERY_FIELD: dict[str, Any] = {
    "keep_ratios": [0, 0.3, 1],
    "objective": "paper",
    "plain_steps": False,
    "plain_step_ms": 50,
    "draft_subsets": False,
    "head_stages": [1, 3],
    "short_blocks": False,
    "short_vocabulary": False,
    "min_gain": 0.1,
    "max_token_ms": 80,
    "min_drafts": 1,
    "calibration": False,
    "cost_correction": False,
    "deterministic": True,
    "probe_budget_s": 5,
    "probe_contexts": [10, 100, 1000],
    "cost_table": "table.json",
    "cost_cache_dir": "",
    "trace_path": "steps.trace",
    "trace_max_mb": 0.5,
    "trace_tokens": True,
    "cpu_overlap": True,
}


@pytest.mark.parametrize(
    "name, value",
    [
        ("keep_ratios", [1.1]),
        ("keep_ratios", [-0.1, 1.0]),
        ("keep_ratios", [0.5, 0.5]),
        ("keep_ratios", [0, 0.0]),
        ("keep_ratios", [True]),
        ("keep_ratios", ["0.5"]),
        ("keep_ratios", [None]),
        ("keep_ratios", [[0.5]]),
        ("keep_ratios", [float("nan")]),
        ("keep_ratios", 0.5),
        ("keep_ratios", "0.5"),
        ("keep_ratios", None),
        ("keep_ratios", {"a": 0.5}),
        ("objective", "Paper"),
        ("objective", ""),
        ("objective", None),
        ("objective", ["paper"]),
        ("draft_subsets", 1),
        ("draft_subsets", None),
        ("head_stages", 2),
        ("head_stages", "2"),
        ("head_stages", [0, 2]),
        ("head_stages", [2, 2]),
        ("head_stages", [5, 2]),
        ("head_stages", [2.0, 5]),
        ("head_stages", [True, 5]),
        ("min_gain", -0.01),
        ("min_gain", 1),
        ("min_gain", "0.1"),
        ("min_gain", False),
        ("min_gain", None),
        ("min_gain", float("nan")),
        ("max_token_ms", 0),
        ("max_token_ms", -5.0),
        ("max_token_ms", "80"),
        ("max_token_ms", True),
        ("max_token_ms", float("inf")),
        ("max_token_ms", float("nan")),
        ("plain_step_ms", -1),
        ("plain_step_ms", True),
        ("plain_step_ms", float("inf")),
        ("cpu_overlap", 1),
        ("min_drafts", -1),
        ("min_drafts", 1.0),
        ("min_drafts", True),
        ("min_drafts", None),
        ("calibration", "yes"),
        ("calibration", None),
        ("cost_correction", 0),
        ("short_blocks", "on"),
        ("short_blocks", None),
        ("short_vocabulary", 1),
        ("deterministic", 1.0),
        ("deterministic", None),
        ("plain_steps", 1),
        ("probe_budget_s", 0),
        ("probe_budget_s", -1.0),
        ("probe_budget_s", "30"),
        ("probe_budget_s", True),
        ("probe_budget_s", None),
        ("probe_budget_s", float("nan")),
        ("probe_contexts", []),
        ("probe_contexts", [64]),
        ("probe_contexts", [512, 64]),
        ("probe_contexts", [64, 64]),
        ("probe_contexts", [0, 64]),
        ("probe_contexts", [64, 512.0]),
        ("probe_contexts", [True, 64]),
        ("probe_contexts", 64),
        ("cost_table", 1),
        ("cost_table", ["a"]),
        ("cost_cache_dir", None),
        ("cost_cache_dir", False),
    ],
)
def test_bad_values_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"(^|: ){name} must be "):
        DCutConfig.from_dict({name: value})
    with pytest.raises(ConfigError, match=f"(^|: ){name} must be "):
        DCutConfig.parse(json.dumps({name: value}))


def test_every_field_can_be_set_and_comes_back() -> None:
    assert set(EVERY_FIELD) == {f.name for f in fields(DCutConfig)}
    config = DCutConfig.from_dict(EVERY_FIELD)
    assert config.to_dict() == EVERY_FIELD
    assert DCutConfig.parse(json.dumps(config.to_dict())) == config
    assert hash(config) == hash(DCutConfig.from_dict(EVERY_FIELD))


def test_defaults_round_trip() -> None:
    config = DCutConfig()
    assert config.keep_ratios == ()  # every number of drafts
    assert config.objective == "throughput"
    assert DCutConfig.from_dict({}) == config
    assert DCutConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("name", ["keep_ratios", "head_stages"])
def test_no_buckets_and_no_stages_are_allowed(name: str) -> None:
    assert getattr(DCutConfig.parse(json.dumps({name: []})), name) == ()


def test_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        DCutConfig().objective = "paper"  # type: ignore[misc]


def test_unknown_keys_are_named_with_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        DCutConfig.from_dict({"keep_ratio": [0.5], "objective": "paper", "depth": 3})
    message = str(caught.value)
    assert "depth, keep_ratio" in message
    for f in fields(DCutConfig):
        assert f.name in message


@pytest.mark.parametrize("data", [None, [], "x", 3, [{"objective": "paper"}]])
def test_only_an_object_is_a_configuration(data: Any) -> None:
    with pytest.raises(ConfigError, match="must be a JSON object"):
        DCutConfig.from_dict(data)


@pytest.mark.parametrize("text", [None, "", " \n"])
def test_no_text_is_the_default(text: str | None) -> None:
    assert DCutConfig.parse(text) == DCutConfig()


def test_inline_and_file_agree(tmp_path: Path) -> None:
    text = '\n {"objective": "paper", "keep_ratios": [0.5]}\n'
    path = tmp_path / "dcut.json"
    path.write_text(text)
    expected = DCutConfig(objective="paper", keep_ratios=(0.5,))
    assert DCutConfig.parse(text) == expected
    assert DCutConfig.parse(str(path)) == expected


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "dcut.json").write_text('{"objective": "paper"}')
    assert DCutConfig.parse("~/dcut.json").objective == "paper"


@pytest.mark.parametrize("text", ['{"objective": ', "{objective: paper}", "{}{}", '"paper'])
def test_bad_inline_json(text: str) -> None:
    with pytest.raises(ConfigError, match="--dcut-config is not valid JSON"):
        DCutConfig.parse(text)


@pytest.mark.parametrize("content", ["", "{", "objective: paper"])
def test_bad_json_in_a_file_names_the_file(tmp_path: Path, content: str) -> None:
    path = tmp_path / "dcut.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"dcut\.json is not valid JSON"):
        DCutConfig.parse(str(path))


@pytest.mark.parametrize("name", ["missing.json", ".", "x" * 5000, "null", "3"])
def test_a_path_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with pytest.raises(ConfigError, match="path of a JSON file"):
        DCutConfig.parse(str(path))


@pytest.mark.parametrize("name", ["binary.json", "a\0b", "~nosuchuser/dcut.json"])
def test_an_unreadable_path_is_a_config_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError):
        DCutConfig.parse(name)
