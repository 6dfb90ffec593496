"""``dcut``: doctor, and the tools that need no server."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from dcut_sglang import __version__
from dcut_sglang.replay.cli import add_replay_arguments, run_replay


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

    args = parser.parse_args(argv)
    return int(args.run(args))


def _doctor(args: argparse.Namespace) -> int:
    # Imports sglang, which takes seconds; the other commands do not need it.
    from dcut_sglang.host.doctor import examine

    return examine(args.model_path, args.draft_model_path)


if __name__ == "__main__":
    sys.exit(main())
