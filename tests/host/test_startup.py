"""What DCUT refuses at start-up, one sentence each, through SGLang's own argument parser."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness import DRAFTER, TARGET

from dcut_sglang.bench.server import REPO_ROOT, cpu_environment

pytest.importorskip("sglang")

from sglang.srt.plugins import load_plugins  # noqa: E402

load_plugins()

from sglang.srt.arg_groups.overrides import resolving_view  # noqa: E402
from sglang.srt.server_args import ServerArgs, prepare_server_args  # noqa: E402

from dcut_sglang.host import compat, server_args  # noqa: E402
from dcut_sglang.host.flag import read_config  # noqa: E402
from dcut_sglang.host.hooks import HOOKS, missing_hooks  # noqa: E402

BASE = ("--model-path", str(TARGET), "--device", "cpu", "--speculative-algorithm", "DCUT")
DRAFT = ("--speculative-draft-model-path", str(DRAFTER))


def resolve(*args: str) -> ServerArgs:
    parsed = prepare_server_args([*BASE, *args])
    parsed.resolve_once()
    return parsed


REFUSED = {
    "no drafter": ([], "--speculative-draft-model-path"),
    "missing drafter": (["--speculative-draft-model-path", "/no/such/folder"], "/no/such/folder"),
    "another target's drafter": (
        ["--speculative-draft-model-path", str(REPO_ROOT / "models" / "smollm2-135m-dflash")],
        "another target: hidden size 576 (target: 128)",
    ),
    "not a drafter": (["--speculative-draft-model-path", str(TARGET)], "not a DFlash drafter"),
    "D = 0": ([*DRAFT, "--speculative-num-draft-tokens", "0"], "[4, 8, 16], got 0"),
    "D not trained": ([*DRAFT, "--speculative-num-draft-tokens", "12"], "[4, 8, 16], got 12"),
    "two Ds": (
        [*DRAFT, "--speculative-num-draft-tokens", "8", "--speculative-dflash-block-size", "4"],
        "differ",
    ),
    "attention backend": ([*DRAFT, "--attention-backend", "torch_native"], "torch_varlen"),
    "pipeline parallel": ([*DRAFT, "--pp-size", "2"], "--pp-size"),
    "data parallel": ([*DRAFT, "--dp-size", "2"], "--dp-size"),
    "lora": ([*DRAFT, "--enable-lora", "--lora-paths", "a=b"], "LoRA"),
    "disaggregation": ([*DRAFT, "--disaggregation-mode", "prefill"], "disaggregation"),
    "tokenizer workers": ([*DRAFT, "--tokenizer-worker-num", "2"], "--tokenizer-worker-num"),
    "mixed chunk": ([*DRAFT, "--enable-mixed-chunk"], "--enable-mixed-chunk"),
    "two batches": ([*DRAFT, "--enable-two-batch-overlap"], "--enable-two-batch-overlap"),
    "draft window": ([*DRAFT, "--speculative-draft-window-size", "64"], "windowed"),
    "hidden states": ([*DRAFT, "--enable-return-hidden-states"], "hidden states"),
    "lossy acceptance": (
        [*DRAFT, "--speculative-accept-threshold-single", "0.5"],
        "--speculative-accept-threshold-single",
    ),
    "unknown setting": ([*DRAFT, "--dcut-config", '{"ratio": 1}'], "known: keep_ratios"),
    "bad setting": ([*DRAFT, "--dcut-config", '{"keep_ratios": [2]}'], "keep_ratios must be"),
    "missing settings file": ([*DRAFT, "--dcut-config", "/no/such.json"], "/no/such.json"),
    "bad JSON": ([*DRAFT, "--dcut-config", '{"a":'], "not valid JSON"),
}


@pytest.mark.parametrize(("args", "phrase"), REFUSED.values(), ids=REFUSED)
def test_refused_with_a_sentence(args: list[str], phrase: str) -> None:
    with pytest.raises(ValueError) as refusal:
        resolve(*args)
    sentence = str(refusal.value)
    assert phrase in sentence
    assert "DCUT" in sentence or "--dcut-config" in sentence or "must be" in sentence


def test_every_refusal_of_the_table_says_what_to_do() -> None:
    for refusal in server_args.REFUSALS:
        assert any(
            way in refusal.sentence for way in ("leave ", "pass ", "start with", "run ", "unset ")
        ), refusal.sentence


def test_drafters_with_sampled_drafts_are_refused() -> None:
    config = json.loads((DRAFTER / "config.json").read_text())
    config["dflash_config"]["projector_type"] = "domino"
    target = SimpleNamespace(hidden_size=128, vocab_size=576, num_hidden_layers=4)
    with pytest.raises(ValueError, match="Domino"):
        server_args.check_drafter(SimpleNamespace(**config), target=target, drafter="x")


def test_recurrent_targets_are_refused() -> None:
    target = SimpleNamespace(layer_types=["linear_attention", "full_attention"])
    with pytest.raises(ValueError, match="linear_attention"):
        server_args.check_target(target, "x")
    server_args.check_target(SimpleNamespace(layer_types=["sliding_attention"]), "x")


def test_settled_arguments() -> None:
    view = resolving_view(resolve(*DRAFT))
    assert view.speculative_num_draft_tokens == 16
    assert view.max_running_requests == server_args.DEFAULT_MAX_RUNNING_REQUESTS
    assert view.attention_backend == view.speculative_draft_attention_backend == "torch_varlen"
    assert resolving_view(resolve(*DRAFT, "--speculative-num-draft-tokens", "8")) \
        .speculative_num_draft_tokens == 8  # fmt: skip


def test_hooks_are_applied_and_seams_are_as_expected() -> None:
    assert missing_hooks() == []
    assert compat.problems() == []
    hooked = {hook.target for hook in HOOKS}
    listed = {seam.path.replace(":", ".") for seam in compat.SEAMS}
    assert hooked <= listed, f"hooked but not checked: {hooked - listed}"


def test_another_sglang_version_is_refused_at_start_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name stays registered, so that the server stops with the reason."""
    monkeypatch.setattr(compat, "installed_version", lambda: "0.5.14")
    problems = compat.problems()
    assert len(problems) == 1 and not problems[0].fatal
    from dcut_sglang.host.algorithm import DCutAlgorithm

    monkeypatch.setattr(DCutAlgorithm, "problems", (problems[0].sentence,))
    with pytest.raises(ValueError, match=r"0\.5\.23, found 0\.5\.14; run: pip install"):
        resolve(*DRAFT)


def test_a_moved_seam_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = compat.Seam("sglang.srt.server_args:prepare_server_args", ("argv", "more"))
    gone = compat.Seam("sglang.srt.server_args:no_such_function", ())
    monkeypatch.setattr(compat, "SEAMS", (moved, gone))
    sentences = [problem.sentence for problem in compat.problems()]
    assert "takes ('argv',), expected ('argv', 'more')" in sentences[0]
    assert "no_such_function is missing" in sentences[1]


@pytest.mark.parametrize(
    ("env", "code", "phrase"),
    [
        (cpu_environment(), 0, "DCUT is registered"),
        ({}, 1, "source scripts/cpu_env.sh"),
        ({**cpu_environment(), "SGLANG_PLUGINS": "none"}, 1, "SGLANG_PLUGINS leaves dcut out"),
    ],
    ids=["ready", "no environment", "not allowed"],
)
def test_doctor(env: dict[str, str], code: int, phrase: str, tmp_path: Path) -> None:
    clean = {k: v for k, v in os.environ.items() if k not in cpu_environment()}
    command = [sys.executable, "-m", "dcut_sglang.cli", "doctor"]
    command += ["--model-path", str(TARGET), "--draft-model-path", str(DRAFTER)]
    done = subprocess.run(
        command, env={**clean, **env, "HOME": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert phrase in done.stdout
    assert ("next: python -m sglang.launch_server" in done.stdout) == (code == 0)


def test_the_cpu_environment_is_gone_when_unset() -> None:
    """Without it, SGLang sees neither our platform nor a stand-in."""
    clean = {k: v for k, v in os.environ.items() if k not in cpu_environment()}
    code = (
        "import importlib.util as u; from dcut_sglang.host.cpu.activate import activate;"
        "print(u.find_spec('sgl_kernel'), activate())"
    )
    done = subprocess.run([sys.executable, "-c", code], env=clean, capture_output=True, text=True)
    assert done.stdout.split() == ["None", "None"], done.stdout + done.stderr


@pytest.mark.parametrize(
    ("source", "stand_in"),
    [
        ("def assign_req_to_token_pool_cpu(): ...", False),
        ("raise ImportError('libcuda.so.1 is missing')", True),
        ("only_cuda_operators = True", True),
    ],
    ids=["CPU build", "does not import", "CUDA build"],
)
def test_a_real_cpu_build_of_sgl_kernel_wins(tmp_path: Path, source: str, stand_in: bool) -> None:
    package = tmp_path / "sgl_kernel"
    package.mkdir()
    (package / "__init__.py").write_text(source)
    env = {**os.environ, **cpu_environment()}
    env["PYTHONPATH"] += os.pathsep + str(tmp_path)
    code = "import sgl_kernel as k; print(getattr(k, 'IS_DCUT_STAND_IN', False))"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout.strip() == str(stand_in), done.stdout + done.stderr


def test_engine_passes_its_settings_in_a_file(tmp_path: Path) -> None:
    """``sgl.Engine`` builds the record without a parser."""

    def record(text: str) -> ServerArgs:
        settings = tmp_path / "dcut.json"
        settings.write_text(text)
        args = ServerArgs(
            model_path=str(TARGET),
            device="cpu",
            speculative_algorithm="DCUT",
            speculative_draft_model_path=str(DRAFTER),
            speculative_adaptive_config=str(settings),
        )
        args.resolve_once()
        return args

    assert read_config(record('{"keep_ratios": [0.5]}')).keep_ratios == (0.5,)
    with pytest.raises(ValueError, match="known: keep_ratios"):
        record('{"ratio": 1}')
