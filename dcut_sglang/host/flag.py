"""``--dcut-config``: how the configuration reaches the worker.

SGLang has no way to declare a further option, so two hooks add one to its parser and carry its
text on the ``ServerArgs`` record, which keeps underscore attributes when it is pickled to child
processes. ``sgl.Engine`` builds the record without a parser; there the existing field
``speculative_adaptive_config``, which names a JSON file, carries the path.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

from dcut_sglang.config import DCutConfig

_ATTRIBUTE = "_dcut_config"


def add_option(add_cli_args: Callable[..., None], parser: argparse.ArgumentParser) -> None:
    """AROUND hook on ``ServerArgs.add_cli_args``."""
    add_cli_args(parser)
    parser.add_argument(
        "--dcut-config",
        type=str,
        default=None,
        metavar="JSON_OR_FILE",
        help="Settings of --speculative-algorithm DCUT: a JSON object, or the path of a JSON "
        "file. Keys: " + ", ".join(DCutConfig().to_dict()) + ".",
    )


def keep_option(server_args: Any, cls: type, args: argparse.Namespace) -> Any:
    """AFTER hook on ``ServerArgs.from_cli_args``.

    Raises:
        ValueError: DCUT is asked for with a checkpoint folder that does not exist. SGLang would
            look such a path up as a model id first, and fail on its spelling.
    """
    setattr(server_args, _ATTRIBUTE, getattr(args, "dcut_config", None))
    if (server_args.speculative_algorithm or "").upper() == "DCUT":
        for option in ("model_path", "speculative_draft_model_path"):
            path = getattr(server_args, option)
            if path is not None and _looks_local(path) and not os.path.isdir(path):
                flag = "--" + option.replace("_", "-")
                raise ValueError(f"DCUT: {flag}: there is no folder {path}; check the path.")
    return server_args


def _looks_local(path: str) -> bool:
    """Whether this cannot be a hub id, which has the form NAMESPACE/NAME."""
    return path.startswith((".", "~", "/")) or path.count("/") != 1


def read_config(server_args: Any) -> DCutConfig:
    """The configuration that came with these arguments, defaults where none did.

    Raises:
        ConfigError: it cannot be used.
    """
    text = getattr(server_args, _ATTRIBUTE, None)
    if text is None:
        text = server_args.speculative_adaptive_config
    return DCutConfig.parse(text)
