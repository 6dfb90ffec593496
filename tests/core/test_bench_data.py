"""Data sets by path, arms by name, and what is read off answers and traces."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcut_sglang.bench import arms, observed
from dcut_sglang.bench.arms import PAIRS, UnknownArmError, find_arm, launch_args, why_not
from dcut_sglang.bench.arrivals import parse_results
from dcut_sglang.bench.data import DataError, DataSet, chat_ids, read_prompts, text_of
from dcut_sglang.bench.plan import rotated
from dcut_sglang.bench.serving_client import provide_datasets
from dcut_sglang.bench.steady import Timeline, percentiles
from dcut_sglang.bench.waves import Prompt, RequestFailed
from dcut_sglang.calibration import Calibration
from dcut_sglang.config import DCutConfig
from dcut_sglang.trace import TraceStep

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import bench  # noqa: E402

RECORDS: dict[str, tuple[dict[str, Any], str]] = {
    "gsm8k": ({"question": "How many?", "answer": "#### 3"}, "How many?"),
    "math500": ({"problem": "Find x.", "solution": "1", "answer": "1"}, "Find x."),
    "humaneval": ({"task_id": "0", "prompt": "def f():", "entry_point": "f"}, "def f():"),
    "mbpp": ({"task_id": 1, "text": "Write a function.", "code": "x"}, "Write a function."),
    "mt_bench": ({"question_id": 1, "turns": ["First.", "Second."]}, "First."),
    "sharegpt": (
        {
            "id": "a",
            "conversations": [
                {"from": "system", "value": "Be kind."},
                {"from": "human", "value": "Hello"},
                {"from": "gpt", "value": "Hi"},
            ],
        },
        "Hello",
    ),
    "chat": ({"messages": [{"role": "user", "content": "Hey"}]}, "Hey"),
}


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("lines", [True, False])
def test_fields_of_public_data_sets_are_found(tmp_path: Path, name: str, lines: bool) -> None:
    record, prompt = RECORDS[name]
    path = tmp_path / f"{name}.json"
    path.write_text("\n".join([json.dumps(record)] * 2) if lines else json.dumps([record] * 2))
    assert read_prompts(path) == [prompt, prompt]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"instruction": "x"}', r"record 1: no prompt found; expected one of .*question"),
        ('{"question": ""}', "no prompt found"),
        ('{"question": 3}', "no prompt found"),
        ('{"conversations": [{"from": "gpt", "value": "x"}]}', "no prompt found"),
        ('["a", "b"]', "got str"),
        ("[]", "holds no records"),
        ('{"question": "x"}\nnot json', "line 2"),
        ("\xff", "neither a JSON list nor JSON lines"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "data.json"
    path.write_text(text)
    with pytest.raises(DataError, match=says):
        read_prompts(path)
    with pytest.raises(DataError, match="easy, hard, mixed or the path"):
        read_prompts(tmp_path / "none.json")


def test_prompts_sent_as_text_are_the_same_tokens() -> None:
    transformers = pytest.importorskip("transformers")
    target = PAIRS["tiny"].target
    ids = chat_ids(target, "records of west\nrecord 16 : name=bob ;\n")
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    assert tuple(tokenizer.encode(text_of(target, ids))) == ids


def test_requests_are_the_same_for_a_seed_and_nested() -> None:
    data = DataSet("mixed", tuple(Prompt("k", ids=(i,)) for i in range(10)), "")
    assert data.requests(25, 1)[:5] == data.requests(5, 1)
    assert data.requests(10, 1) != data.requests(10, 2)
    assert sorted(p.ids for p in data.requests(10, 3)) == [(i,) for i in range(10)]


def test_arms_name_their_servers_and_flags(tmp_path: Path) -> None:
    pair = PAIRS["tiny"]
    common = [*arms.COMMON_ARGS, "--dtype", "float32"]
    for name in arms.LAUNCHES:
        if why_not(name, pair) is None:
            assert launch_args(name, pair, "float32", tmp_path)[: len(common)] == common
    args = launch_args("dcut-paper", pair, "float32", tmp_path)
    settings = DCutConfig.parse(args[args.index("--dcut-config") + 1])
    assert settings.objective == "paper" and not settings.plain_steps
    for name, less in arms.ABLATIONS.items():
        args = launch_args(name, pair, "float32", tmp_path)
        settings = DCutConfig.parse(args[args.index("--dcut-config") + 1])
        (changed,) = set(less)
        assert getattr(settings, changed) != getattr(DCutConfig(), changed)
    assert "--speculative-num-draft-tokens" in launch_args("dflash-8", pair, "float32", tmp_path)


def test_arms_by_name() -> None:
    assert find_arm("dcut-25").server == "dcut"
    assert find_arm("dcut-25").knobs == {"dcut_force_ratio": 0.25}
    again = find_arm("plain@again")
    assert again.server == "plain" and again.base == "plain"
    assert find_arm("mine", ["mine"]).server == "mine"
    with pytest.raises(UnknownArmError, match="no arm 'mine'; there are plain, dflash"):
        find_arm("mine")


def test_what_is_missing_is_the_reason() -> None:
    pair = PAIRS["tiny"]
    assert why_not("mtp", pair) == "the target of tiny has no layers for multi-token prediction"
    assert why_not("dspark", pair) == "no dspark drafter for tiny"
    assert why_not("plain", pair) is None


def test_plain_is_first_in_pass_0_and_the_order_rotates() -> None:
    found = [find_arm(name) for name in ("dflash", "plain", "dcut")]
    orders = [[arm.name for arm in rotated(found, number)] for number in range(3)]
    assert orders == [
        ["plain", "dflash", "dcut"],
        ["dflash", "dcut", "plain"],
        ["dcut", "plain", "dflash"],
    ]


def test_urls_are_names_and_addresses() -> None:
    assert bench.read_urls(["a=http://h:1/"]) == {"a": "http://h:1"}
    for wrong in ("http://h:1", "a=h:1", "=http://h"):
        with pytest.raises(ValueError, match="NAME=URL"):
            bench.read_urls([wrong])


def test_quick_has_seven_arms_that_run_on_a_cpu() -> None:
    args = bench.parse(["--quick"])
    assert {"plain", "dflash", "dcut", "dcut-25", "dcut-50", "dcut-75", "dcut-100"} <= set(
        args.arms
    )
    assert bench.parse(["--quick", "--tokens", "8"]).tokens == 8
    assert bench.parse([]).passes >= 2


def test_latencies_of_a_stream() -> None:
    stream = Timeline("abc", 7, 10.0, ((10.2, 1), (10.3, 5), (10.5, 7)))
    assert stream.ttft_ms == pytest.approx(200)
    assert stream.tpot_ms == pytest.approx(300 / 6)
    assert stream.itl_ms == pytest.approx([25] * 4 + [100] * 2)
    assert math.isnan(Timeline("a", 1, 0.0, ((1.0, 1),)).tpot_ms)
    assert percentiles([1.0, 3.0, math.nan]) == {"p50": 2.0, "p99": 2.98}
    assert percentiles([math.nan]) is None


def test_acceptance_from_answers() -> None:
    meta = {
        "spec_correct_drafts_histogram": [1, 2, 1],
        "spec_verify_ct": 4,
        "spec_num_proposed_drafts": 12,
    }
    stream = Timeline("abc", 8, 0.0, ((1.0, 8),), meta)
    fields = observed.from_answers([stream, stream], is_chain=True)
    assert fields["accept_length"] == 2.0
    assert fields["accept_histogram"] == [2, 4, 2]
    assert fields["position_verified"] == [8, 8, 8]
    assert fields["position_accepted"] == [6, 2, 0]
    assert "position_verified" not in observed.from_answers([stream], is_chain=False)
    assert observed.from_answers([Timeline("a", 1, 0.0, ((1.0, 1),))], is_chain=True) == {}


def _step(**changes: Any) -> TraceStep:
    values: dict[str, Any] = {
        "step": 0,
        "mode": "speculate",
        "forced": "",
        "predicted_ms": 10.0,
        "measured_ms": 12.0,
        "phase_ms": np.zeros(4, np.float32),
        "requests": np.array([1, 2]),
        "contexts": np.array([5, 5]),
        "verify_lens": np.array([3, 1]),
        "accepted": np.array([1, 0]),
        "confidence": np.array([[0.95, 0.55, 0.5], [0, 0, 0]], np.float32),
    }
    return TraceStep(**{**values, **changes})


def test_fields_from_a_trace() -> None:
    plain = _step(mode="plain", verify_lens=np.array([1, 1]), confidence=None)
    calibration = Calibration(3).to_json()
    fields = observed.from_trace([_step(), plain], calibration)
    assert fields["accept_histogram"] == [3, 1]
    assert fields["position_verified"] == [1, 1]
    assert fields["position_accepted"] == [1, 0]
    assert fields["by_batch_size"] == [[2, 2, 3, 2, 1]]
    assert fields["step_sample"] == [[2, 4, 10.0, 12.0], [2, 2, 10.0, 12.0]]
    # Draft 1 was accepted, draft 2 was not, draft 3 was cut: its outcome is unknown.
    assert fields["reliability"]["count"] == [0, 0, 0, 0, 0, 1, 0, 0, 0, 1]
    assert fields["reliability"]["accepted"] == [0, 0, 0, 0, 0, 0, 0, 0, 0, 1]
    assert observed.from_trace([], calibration) == {}
    assert observed.from_trace([plain], calibration)["reliability"] is None


def test_calibration_is_read_back() -> None:
    learnt = Calibration(3)
    confidence = np.full((64, 3), 0.5, np.float32)
    learnt.learn(confidence, np.full(64, 3), np.full(64, 3))
    back = Calibration.from_json(learnt.to_json())
    np.testing.assert_allclose(back.apply(confidence), learnt.apply(confidence), atol=1e-3)


def test_results_of_the_serving_benchmark() -> None:
    found: dict[str, Any] = {
        "completed": 2,
        "duration": 4.0,
        "total_output_tokens": 80,
        "generated_texts": ["a", "b"],
    }
    for name in ("ttft_ms", "tpot_ms", "itl_ms"):
        found |= {f"median_{name}": 1.0, f"p99_{name}": 2.0}
    result = parse_results(found, 2, 9.0, 3.0, ())
    assert result.overall.tokens_per_s == 20.0
    assert result.latencies["ttft_ms"] == {"p50": 1.0, "p99": 2.0}
    with pytest.raises(RequestFailed, match="2 of 3 requests were answered; first error: boom"):
        parse_results({**found, "errors": ["", "boom"]}, 3, 9.0, 3.0, ())


def test_the_serving_benchmark_starts_without_the_datasets_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "datasets", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    provide_datasets()
    stand_in = sys.modules.pop("datasets")
    with pytest.raises(ModuleNotFoundError, match="pip install datasets"):
        stand_in.load_dataset("MMMU")
