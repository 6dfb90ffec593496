#!/usr/bin/env bash
# Runs the commands behind a published file of bench_results/ again: scripts/reproduce.sh NAME
# An interrupted benchmark goes on where it stopped; delete its .jsonl to measure from the start.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
    sed -n 's/^    \([a-z0-9-]*\)) *# \(.*\)/\1\t\2/p' scripts/reproduce.sh | expand -t 40
}

plot() { # ROWS [further arguments]: figures and tables in bench_results/figures/NAME
    bash -c 'source scripts/cpu_env.sh && exec .venv/bin/python scripts/plot.py "$@"' plot "$@"
}

three_loads() { # NAME ARM...: six servers at a time fit into 24 GB
    local rows="bench_results/bench-$1-smollm2.jsonl"
    shift
    make setup
    bash -c 'source scripts/cpu_env.sh && exec .venv/bin/python scripts/bench.py "$@"' bench \
        --arms "$@" --data mixed hard --concurrency 1 8 32 --tokens 40 --out "$rows"
}

ablations() { # NAME VARIANT...
    local name=$1
    shift
    three_loads "ablations-$name" plain dcut "${@/#/dcut-}"
}

case "${1:-}" in
    bench-smollm2)      # nine arms at every load, figures and tables; 40 minutes
        make bench ARGS="--arms plain dflash dcut dcut-25 dcut-50 dcut-75 dcut-100 ngram eagle3 \
            --tokens 40 --requests-per-slot 2"
        ;;
    bench-quick-smollm2) # two loads, under 15 minutes
        make bench-quick
        ;;
    bench-ablations-drafting-smollm2) # DCUT without one of its additions to drafting; 15 minutes
        ablations drafting whole-blocks all-or-none long-blocks always-drafts
        ;;
    bench-ablations-choosing-smollm2) # without one of those to choosing, and as published; 15 minutes
        ablations choosing whole-vocabulary four-ratios uncalibrated paper
        ;;
    bench-blocks-smollm2) # blocks of 8 and of 16; 12 minutes
        three_loads blocks plain dflash dflash-8 dcut dcut-8
        ;;
    bench-tiny)         # the same on the tiny pair
        make bench MODEL=tiny
        ;;
    bench-peer-smollm2) # vLLM's CPU build over its own plain decoding; an hour
        make bench-peer
        ;;
    figures)            # figures and tables of all rows that are there, without measuring
        make setup
        mkdir -p .cache
        .venv/bin/dcut replay --regret --quiet > .cache/regret.txt || test $? -eq 1
        for rows in bench_results/bench-*.jsonl; do
            # The peer's rates do not compare with these arms': no figures of it.
            [[ $rows == */bench-peer-* ]] || plot "$rows" --replay .cache/regret.txt
        done
        ;;
    demo-smollm2)       # the README's first figure
        make demo
        ;;
    demo-tiny)          # the same on the tiny pair
        make demo MODEL=tiny
        ;;
    never-slower)       # DCUT against the better of plain and DFLASH
        make never-slower
        ;;
    published)          # docs/published.md and its figures
        make published
        ;;
    regret)             # shares of the best possible, on recorded texts
        make regret
        ;;
    *)
        echo "usage: scripts/reproduce.sh NAME, with NAME one of" >&2
        usage >&2
        exit 2
        ;;
esac
