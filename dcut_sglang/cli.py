"""``dcut``: doctor, and the tools that need no server."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from dcut_sglang import __version__
from dcut_sglang.replay.cli import add_replay_arguments, run_replay
from dcut_sglang.report.cli import add_report_arguments, run_report


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; its exit code."""
    parser = argparse.ArgumentParser(prog="dcut", description="D-Cut for SGLang")
    parser.add_argument("--version", action="version", version=f"dcut_sglang {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    doctor = commands.add_parser("doctor", help="check this installation, and what to run next")
    doctor.add_argument("--model-path", help="also check this target ...")
    doctor.add_argument("--draft-model-path", help="... against this drafter")
    doctor.set_defaults(run=_doctor)

    replay = commands.add_parser("replay", help="any policy on a trace; the published tables")
    add_replay_arguments(replay)
    replay.set_defaults(run=run_replay)

    report = commands.add_parser("report", help="rows and traces as one interactive HTML file")
    add_report_arguments(report)
    report.set_defaults(run=run_report)

    conform = commands.add_parser(
        "conform", help="compare a DCUT server with a plain one, request feature by feature"
    )
    conform.add_argument("--url", required=True, help="the server that runs DCUT")
    conform.add_argument(
        "--against", required=True, help="a server of the same target without speculation"
    )
    conform.add_argument(
        "--only", default="", metavar="TEXT", help="only cases whose name has this in it"
    )
    conform.add_argument(
        "--concurrency", type=int, default=16, help="requests at once in the mixed runs"
    )
    conform.add_argument(
        "--tie-margin",
        type=float,
        default=1e-4,
        help="log-probabilities this close may change places (float32: 1e-4, the default)",
    )
    conform.add_argument(
        "--logprob-tolerance",
        type=float,
        default=1e-3,
        help="how far reported log-probabilities may be apart",
    )
    conform.set_defaults(run=_conform)

    args = parser.parse_args(argv)
    return int(args.run(args))


def _doctor(args: argparse.Namespace) -> int:
    # Imports sglang, which takes seconds; the other commands do not need it.
    from dcut_sglang.host.doctor import examine

    return examine(args.model_path, args.draft_model_path)


def _conform(args: argparse.Namespace) -> int:
    from dcut_sglang.conform.case import all_cases
    from dcut_sglang.conform.client import Client, ConformError
    from dcut_sglang.conform.run import Tolerances, print_summary, run_conformance

    cases = [case for case in all_cases() if args.only in case.name]
    if not cases:
        names = sorted({case.group for case in all_cases()})
        print(f"dcut conform: --only {args.only!r} names no case; groups: {', '.join(names)}")
        return 2
    try:
        summary = run_conformance(
            Client(args.url, args.concurrency),
            Client(args.against, args.concurrency),
            cases,
            concurrency=args.concurrency,
            tolerances=Tolerances(args.tie_margin, args.logprob_tolerance),
        )
    except ConformError as error:
        print(f"dcut conform: {error}", file=sys.stderr)
        return 2
    return print_summary(summary)


if __name__ == "__main__":
    sys.exit(main())
