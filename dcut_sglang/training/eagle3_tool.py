"""One call of the EAGLE-3 training tool, on the responses of a drafter's training run."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

import torch

from dcut_sglang.bench.rows import cpu_info
from dcut_sglang.training.eagle3 import Eagle3Head, load, save
from dcut_sglang.training.eagle3_fit import (
    Eagle3Fitter,
    frequent_tokens,
    head_config,
    head_from_target,
    head_proposer,
)
from dcut_sglang.training.eagle3_report import Eagle3Report, evaluate, model_card
from dcut_sglang.training.evaluate import walk
from dcut_sglang.training.files import write_text
from dcut_sglang.training.fit import FitConfig
from dcut_sglang.training.prompts import KINDS, Prompt
from dcut_sglang.training.responses import Response
from dcut_sglang.training.run import Probe, identity_of, settled_steps, train
from dcut_sglang.training.store import ResponseStore
from dcut_sglang.training.target import (
    check_fingerprint,
    embedding_and_head,
    fingerprint,
    load_target,
)

# Share of --minutes after which training stops, for evaluation and export to fit.
_TRAIN_SHARE = 0.9
_NUM_PROBE_PER_KIND = 2


class Eagle3Run:
    """A call's arguments, clock and data.

    The responses come from the work folder of a drafter's run (`scripts/train_drafter.py`), which
    is only read.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.begin_s = time.monotonic()
        source = json.loads((args.data / "run.json").read_text())
        self.target = load_target(args.target)
        self.fingerprint = fingerprint(self.target)
        check_fingerprint(self.fingerprint, source["fingerprint"], f"the run in {args.data}")
        self.embed, _ = embedding_and_head(self.target)
        stored = source["target_layer_ids"]
        if missing := set(args.target_layers) - set(stored):
            raise ValueError(f"{args.data} has layers {stored}, not {sorted(missing)}")
        hidden = self.target.config.hidden_size
        self._columns = torch.cat(
            [torch.arange(hidden) + hidden * stored.index(i) for i in args.target_layers]
        )
        self._prompts = [Prompt(**e) for e in json.loads((args.data / "prompts.json").read_text())]
        self._store = ResponseStore(args.data / "features")
        self.folder = args.workdir / "head"

    def log(self, message: str) -> None:
        print(f"[{(time.monotonic() - self.begin_s) / 60:5.1f} min] {message}", flush=True)

    def _held_out(self) -> tuple[list[Response], list[str], list[str]]:
        """Returns the held-out responses that there are, their kinds and splits."""
        chosen = [i for i in self._store.indices() if self._prompts[i].split != "train"]
        found = self._store.load(set(chosen), self._columns)
        prompts = [self._prompts[i] for i in found]
        return list(found.values()), [p.kind for p in prompts], [p.split for p in prompts]

    def _new_head(self, responses: list[Response]) -> Eagle3Head:
        args = self.args
        config = head_config(
            self.target,
            tuple(args.target_layers),
            args.draft_vocab,
            args.unroll,
            self.fingerprint,
        )
        ids = frequent_tokens(responses, config.vocab_size, config.draft_vocab_size)
        torch.manual_seed(args.seed)
        return head_from_target(config, self.target, ids)

    def train(self) -> None:
        """Trains on the responses that were there when training began."""
        args = self.args
        path = args.workdir / "settings.json"
        known = json.loads(path.read_text()) if path.exists() else None
        chosen = known["responses"] if known else sorted(self._store.indices())
        indices = [i for i in chosen if self._prompts[i].split == "train"]
        responses = list(self._store.load(set(indices), self._columns).values())
        if not responses:
            raise ValueError(f"{args.data} has no training responses yet")
        config = FitConfig(
            num_steps=args.steps or 1000,
            num_sequences=args.sequences,
            num_block_tokens=args.block_tokens,
            lr=args.lr,
            warmup_steps=10,
            decay_share=0.7,
            seed=args.seed,
            num_extra_tokens=512,
            dtype=args.dtype,
        )
        deadline_s = self.begin_s + 60 * args.minutes * _TRAIN_SHARE if args.minutes else None
        config = settled_steps(
            config,
            known,
            args.steps,
            deadline_s,
            0.95,
            lambda: Eagle3Fitter(self._new_head(responses), self.embed, responses, config),
        )
        head = self._new_head(responses)
        facts = {
            "fit": asdict(config),
            "num_responses": len(responses),
            "num_tokens": sum(len(r.token_ids) - r.num_prompt_tokens for r in responses),
            "responses": indices,
        }
        write_text(path, json.dumps(facts) + "\n")
        self.log(f"training: {facts['num_responses']} responses, {facts['num_tokens']} tokens")
        fitter = Eagle3Fitter(head, self.embed, responses, config)
        cpu_s = train(
            fitter,
            config.num_steps,
            args.workdir / "state.pt",
            identity_of(head, config, indices),
            deadline_s,
            self.log,
            self._probe(head),
        )
        spent = {"cpu_s": round(cpu_s), "num_done": fitter.num_done}
        write_text(path, json.dumps(facts | spent) + "\n")
        save(head, self.folder, torch.bfloat16)
        self.log(f"training: {fitter.num_done} of {config.num_steps} steps done")

    def _probe(self, head: Eagle3Head) -> Probe | None:
        """Returns the accept length at 3 drafts on a few held-out prompts, as a function.

        None if no held-out response is there yet.
        """
        responses, kinds, splits = self._held_out()
        unseen = [i for i, split in enumerate(splits) if split == "prompt"]
        few = [
            responses[i]
            for kind in KINDS
            for i in [i for i in unseen if kinds[i] == kind][:_NUM_PROBE_PER_KIND]
        ]
        if not few:
            return None

        def probe() -> dict[str, float]:
            steps = walk(few, head_proposer(head, self.embed, few, 3), 4)
            return {"accept_length": steps.accept_length()}

        return probe

    def evaluate(self, folder: Path) -> Eagle3Report:
        """Measures the head in a folder on the held-out responses."""
        head = load(folder)
        if head.config.target_fingerprint is not None:
            check_fingerprint(self.fingerprint, head.config.target_fingerprint, str(folder))
        return evaluate(head, self.embed, *self._held_out(), self.log)

    def export(self, report: Eagle3Report) -> None:
        """Ships the trained head with its card."""
        args, head = self.args, load(self.folder)
        facts = json.loads((args.workdir / "settings.json").read_text())
        curve = (args.workdir / "curve.jsonl").read_text()
        settings = {key: value for key, value in facts.items() if key != "responses"}
        write_text(args.out / "training/settings.json", json.dumps(settings, indent=1) + "\n")
        write_text(args.out / "training/curve.jsonl", curve)
        save(head, args.out, torch.bfloat16)
        num_prompt = sum(split == "prompt" for split in self._held_out()[2])
        card = model_card(
            report,
            head,
            target_name=args.name,
            num_responses=facts["num_responses"],
            num_tokens=facts["num_tokens"],
            num_done=facts["num_done"],
            num_steps=facts["fit"]["num_steps"],
            cpu_minutes=facts["cpu_s"] / 60,
            machine=cpu_info().get("model name", "an unknown CPU"),
            num_prompt=num_prompt,
        )
        write_text(args.out / "README.md", card)
        self.log(f"export: {args.out}")
