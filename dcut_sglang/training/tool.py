"""One call of the training tool: stages that go on where an earlier call stopped."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch

from dcut_sglang.training.drafter import Drafter, DrafterConfig, load, save
from dcut_sglang.training.export import export, weights_digest
from dcut_sglang.training.files import write_text
from dcut_sglang.training.fit import FitConfig, Fitter
from dcut_sglang.training.ngram import NgramModel
from dcut_sglang.training.pipeline import (
    MIN_OWN_SHARE,
    RunSettings,
    collect_texts,
    fix_prompts,
    generate_responses,
    restore_responses,
)
from dcut_sglang.training.prompts import OPEN_KINDS, prompt_set
from dcut_sglang.training.report import Report, evaluate
from dcut_sglang.training.responses import Response, responses_of_texts
from dcut_sglang.training.run import accept_length_probe, identity_of, settled_steps, train
from dcut_sglang.training.start import drafter_config, from_checkpoint, from_target
from dcut_sglang.training.store import ResponseStore, Texts
from dcut_sglang.training.target import (
    check_fingerprint,
    default_layer_ids,
    default_mask_token_id,
    embedding_and_head,
    encode_prompts,
    fingerprint,
    load_target,
    load_tokenizer,
)
from dcut_sglang.training.teacher import Teacher
from dcut_sglang.training.vocabulary import worth_drafting

STAGES = ("prompts", "responses", "train", "eval", "export")
# Shares of --minutes after which generation and training stop.
UNTIL = {"responses": 0.5, "train": 0.88}


class Run:
    """One call of the tool: its arguments, its clock, and what several stages need."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.begin_s = time.monotonic()
        self.target = load_target(args.target, args.device)
        self.tokenizer = load_tokenizer(args.target)
        self.fingerprint = fingerprint(self.target)
        if args.init is not None:
            self._check_target(args.init)
        self.embed, self.head = embedding_and_head(self.target)
        layer_ids = args.target_layers or default_layer_ids(self.target.config.num_hidden_layers)
        self.settings = RunSettings(
            fingerprint=self.fingerprint,
            seed=args.seed,
            num_train=args.prompts,
            max_new_tokens=args.max_new_tokens,
            target_layer_ids=tuple(layer_ids),
        )
        self.store_folder = args.workdir / "features"
        self.train_folder = args.workdir / "train"
        self.drafter_folder = args.workdir / "drafter"

    def log(self, message: str) -> None:
        print(f"[{(time.monotonic() - self.begin_s) / 60:5.1f} min] {message}", flush=True)

    def deadline_s(self, share: float) -> float | None:
        """Returns the time.monotonic() at which this share of --minutes is over."""
        return self.begin_s + 60 * self.args.minutes * share if self.args.minutes else None

    def _check_target(self, folder: Path) -> None:
        """Raises ValueError if a drafter is known to be another target's."""
        config = DrafterConfig.from_json(json.loads((folder / "config.json").read_text()))
        if config.target_fingerprint is not None:
            check_fingerprint(self.fingerprint, config.target_fingerprint, str(folder))

    def _share(self, stage: str) -> float:
        """Returns when a stage must end; the last one may use all of the time."""
        return 1.0 if self.args.stages[-1] == stage else UNTIL[stage]

    def prompts(self) -> None:
        """Fixes the prompt set of this run."""
        self.settings.bind(self.args.workdir)
        avoid = [e["prompt"] for e in json.loads(self.args.exclude.read_text())]
        seen = json.loads(self.args.seen.read_text()) if self.args.seen else []
        self.chosen = fix_prompts(
            self.args.workdir,
            lambda: prompt_set(self.args.seed, self.args.prompts, avoid, seen),
        )
        self.log(f"prompts: {len(self.chosen)}")

    def responses(self) -> None:
        """Generates what is missing of the responses."""
        self.prompts()
        encoded = encode_prompts(self.tokenizer, [p.text for p in self.chosen])
        store = ResponseStore(self.store_folder)
        texts = Texts.load(self.args.texts) if self.args.texts is not None else None
        # What is measured is the target's greedy text in float32; what is learnt from need not be.
        num_held_out = sum(prompt.split != "train" for prompt in self.chosen)
        for dtype, some in (("float32", encoded[:num_held_out]), (self.args.dtype, encoded)):
            if texts is not None:
                restore_responses(self.target, texts, some, self.settings, store, dtype, self.log)
            generate_responses(
                self.target,
                some,
                self.settings,
                store,
                self.tokenizer.eos_token_id,
                self.args.rows,
                dtype,
                self.deadline_s(self._share("responses")),
                self.log,
            )

    def _start(self) -> Drafter:
        args = self.args
        mask_token_id = args.mask_token_id
        if mask_token_id is None:
            mask_token_id = default_mask_token_id(self.tokenizer)
        config = drafter_config(
            self.target,
            args.layers,
            args.block_sizes,
            self.settings.target_layer_ids,
            mask_token_id,
            self.fingerprint,
        )
        made = from_checkpoint(config, args.init) if args.init else from_target(config, self.target)
        return made.to(args.device)

    def train(self) -> None:
        """Trains on the responses that were there when training began."""
        args = self.args
        self.settings.bind(args.workdir)
        self.prompts()
        found = ResponseStore(self.store_folder).load()
        path = self.train_folder / "settings.json"
        known = json.loads(path.read_text()) if path.exists() else None
        chosen = known["responses"] if known else list(found)
        indices = [i for i in chosen if self.chosen[i].split == "train"]
        responses = [found[i] for i in indices]
        if not responses:
            raise ValueError(
                "no training responses yet: repeat the command, or give it more --minutes"
            )
        drafter = self._start()
        config = FitConfig(
            num_steps=args.steps or 1000,
            num_sequences=args.sequences,
            num_block_tokens=args.block_tokens,
            lr=args.lr,
            decay_share=0.7,
            seed=args.seed,
            num_extra_tokens=1024,
            open_share=args.open_share,
            taught_share=args.taught_share,
            dtype=args.dtype,
        )
        is_open = [self.chosen[i].kind in OPEN_KINDS for i in indices]
        teacher = Teacher(self.target, self.settings.target_layer_ids[-1])

        def new_fitter(drafter: Drafter) -> Fitter:
            return Fitter(drafter, self.embed, self.head, responses, config, is_open, teacher)

        deadline_s = self.deadline_s(self._share("train"))
        config = settled_steps(
            config, known, args.steps, deadline_s, 0.92, lambda: new_fitter(drafter)
        )
        drafter = self._start()
        fitter = new_fitter(drafter)
        num_tokens = sum(len(r.token_ids) - r.num_prompt_tokens for r in responses)
        facts = {
            "target": str(args.target),
            "init": str(args.init) if args.init else None,
            "fit": asdict(config),
            "num_responses": len(responses),
            "num_tokens": num_tokens,
            "run": asdict(self.settings),
            "responses": indices,
        }
        write_text(path, json.dumps(facts) + "\n")
        self.log(f"training: {len(responses)} responses, {num_tokens} tokens")
        held_out = [r for i, r in found.items() if self.chosen[i].split == "prompt"]
        kinds = [p.kind for i in found if (p := self.chosen[i]).split == "prompt"]
        probe = accept_length_probe(drafter, self.embed, self.head, held_out, kinds)
        cpu_s = train(
            fitter,
            config.num_steps,
            self.train_folder / "state.pt",
            identity_of(drafter, config, indices),
            deadline_s,
            self.log,
            probe if held_out else None,
        )
        spent = {"cpu_s": round(cpu_s), "num_done": fitter.num_done}
        write_text(path, json.dumps(facts | spent) + "\n")
        vocabulary = worth_drafting(
            responses, drafter.config.draft_vocabulary, drafter.config.vocab_size
        )
        drafter.config = replace(drafter.config, draft_vocabulary=vocabulary)
        save(drafter, self.drafter_folder, torch.bfloat16)
        self.log(f"training: {fitter.num_done} of {config.num_steps} steps done")

    @property
    def _has_texts(self) -> bool:
        """Whether the texts are those of an earlier run, as they are."""
        return self.args.texts is not None and "responses" not in self.args.stages

    def _held_out(self) -> tuple[list[Response], Texts, NgramModel]:
        """Returns the held-out responses, the same as texts, and the baseline."""
        if self._has_texts:
            texts = Texts.load(self.args.texts)
        else:
            self.prompts()
            stored, texts = collect_texts(ResponseStore(self.store_folder), self.chosen)
        learnt = [
            ids for ids, split in zip(texts.token_ids, texts.split, strict=True) if split == "train"
        ]
        rows = [i for i, split in enumerate(texts.split) if split != "train"]
        held = texts.rows(rows)
        if not self._has_texts:
            responses = [stored[i] for i in rows]
        else:
            responses, share = responses_of_texts(
                self.target,
                held.token_ids,
                held.num_prompt_tokens,
                held.ends,
                self.settings.target_layer_ids,
                log=self.log,
            )
            if share < MIN_OWN_SHARE:
                raise ValueError(f"{self.args.texts}: {share:.1%} of its tokens are the target's")
        return responses, held, NgramModel(learnt)

    def evaluate(self, folder: Path, is_quick: bool = False) -> Report:
        """Measures the drafter in a folder on the held-out responses."""
        self._check_target(folder)
        drafter = load(folder).to(self.args.device)
        responses, texts, ngram = self._held_out()
        report = evaluate(
            drafter,
            self.embed,
            self.head,
            responses,
            texts.kind,
            texts.split,
            ngram,
            is_quick,
            self.log,
        )
        self.log(f"{folder}: code {report.code:.3f}, chat {report.chat:.3f}")
        return report

    def _code_of(self, folder: Path) -> float:
        """Returns a drafter's mean over the code kinds, measured once per checkpoint."""
        path = self.args.workdir / "measured.json"
        known: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
        digest = weights_digest(folder)
        if digest not in known:
            known[digest] = self.evaluate(folder, is_quick=True).code
            write_text(path, json.dumps(known) + "\n")
        return known[digest]

    def export(self, report: Report) -> bool:
        """Ships the drafter unless the one in --out is better; returns whether it did."""
        out = self.args.out
        if (out / "model.safetensors").exists() and not self.args.force:
            before = self._code_of(out)
            if before >= report.code:
                self.log(f"export: the drafter in {out} is better ({before:.3f}); kept")
                return False
        if self._has_texts:
            texts = Texts.load(self.args.texts)
        else:
            _, texts = collect_texts(ResponseStore(self.store_folder), self.chosen)
        facts = json.loads((self.train_folder / "settings.json").read_text())
        curve = (self.train_folder / "curve.jsonl").read_text()
        export(self.drafter_folder, out, report, texts, facts, curve, self.args.name)
        self.log(f"export: {out}")
        return True
