# Every target does its own set-up; `make help` lists them.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.setup-done
IN_ENV := source scripts/cpu_env.sh && $(VENV)/bin/python
SMOLLM2 := .cache/models/smollm2
PEER_VENV := .cache/peer-venv
PEER_STAMP := $(PEER_VENV)/.setup-done

.DEFAULT_GOAL := help
.PHONY: help setup demo report test conform fuzz soak bench bench-quick bench-peer never-slower published regret eval-drafter test-core lint format clean

help:           ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

setup: $(STAMP) ## virtual environment with SGLang 0.5.23 for the CPU, in .venv (about 3 minutes)

$(STAMP): requirements/cpu.txt requirements/cpu-nodeps.txt requirements/constraints-cpu.txt requirements/dev.txt pyproject.toml scripts/setup.sh
	bash scripts/setup.sh "$(PYTHON)" $(VENV)
	@touch $@

$(SMOLLM2)/config.json: $(STAMP) scripts/convert_smollm2.py
	$(IN_ENV) scripts/convert_smollm2.py $(SMOLLM2)

demo: $(STAMP)  ## the main job on this machine's CPU: MODEL=smollm2 (default) or MODEL=tiny
	@if [ "$(MODEL)" != tiny ]; then $(MAKE) --no-print-directory $(SMOLLM2)/config.json; fi
	$(IN_ENV) scripts/demo.py --model $(or $(MODEL),smollm2)

test: $(STAMP)  ## everything that CI runs: lint, types, core tests, real-server tests
	$(MAKE) --no-print-directory lint
	$(IN_ENV) -m pytest -q tests

report: $(STAMP) ## rows of bench_results and traces of the last runs as one page, .cache/report.html
	$(VENV)/bin/dcut report bench_results/*.jsonl $(wildcard .cache/*-logs/dcut.trace) -o .cache/report.html

conform: $(STAMP) ## DCUT against plain decoding, feature by feature, on the tiny pair (under 10 minutes)
	$(IN_ENV) scripts/conform.py

fuzz: $(STAMP)  ## 500 random mixed requests under random decisions, against plain decoding: SEED=...
	$(IN_ENV) scripts/fuzz.py $(if $(SEED),--seed $(SEED))

soak: $(STAMP)  ## 1 to 64 requests at once and back for MINUTES=20; memory and pools stay flat
	$(IN_ENV) scripts/soak.py --minutes $(or $(MINUTES),20)

bench: $(STAMP) ## every arm at every load, rows and figures: MODEL=tiny, ARGS="--arms plain dcut"; resumes
	@if [ "$(MODEL)" != tiny ]; then $(MAKE) --no-print-directory $(SMOLLM2)/config.json; fi
	$(IN_ENV) scripts/bench.py --model $(or $(MODEL),smollm2) $(ARGS)
	$(IN_ENV) scripts/plot.py bench_results/bench-$(or $(MODEL),smollm2).jsonl

bench-quick: $(STAMP) ## the arms at two loads, in under 15 minutes: MODEL=tiny, ARGS=...
	@if [ "$(MODEL)" != tiny ]; then $(MAKE) --no-print-directory $(SMOLLM2)/config.json; fi
	$(IN_ENV) scripts/bench.py --quick --model $(or $(MODEL),smollm2) $(ARGS)

$(PEER_STAMP): requirements/peer.txt scripts/setup_peer.sh
	bash scripts/setup_peer.sh "$(PYTHON)" $(PEER_VENV)
	@touch $@

bench-peer: $(SMOLLM2)/config.json $(PEER_STAMP) ## vLLM's CPU build: its DFlash over its own plain decoding: ARGS=...; 3.5 GB
	$(IN_ENV) scripts/bench_peer.py $(ARGS)

never-slower: $(SMOLLM2)/config.json ## DCUT against the better of plain and DFLASH at every load: QUICK=1 for four cells
	$(IN_ENV) scripts/never_slower.py

published: $(STAMP) ## the D-Cut page's tables, recomputed: docs/published.md and its figures
	$(VENV)/bin/dcut replay --published --page docs

regret: $(STAMP) ## every policy's share of the best possible, on recorded texts
	$(VENV)/bin/dcut replay --regret --quiet

eval-drafter: $(SMOLLM2)/config.json ## the drafter in training against its bars, on held-out prompts
	$(IN_ENV) scripts/train_drafter.py --stages eval --out models/smollm2-135m-dflash \
	    --texts models/smollm2-135m-dflash/training/responses.npz

test-core: $(STAMP) ## the tests that need neither SGLang nor a server
	$(IN_ENV) -m pytest -q tests/core

lint: $(STAMP)  ## ruff and mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(STAMP) ## apply ruff's formatting and fixes
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:          ## remove the virtual environment and everything downloaded or built
	rm -rf $(VENV) .cache build *.egg-info
