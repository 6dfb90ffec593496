"""``python -m dcut_sglang.bench.serving_client``: sglang.benchmark.serving, same arguments.

SGLang's benchmark imports the ``datasets`` package for one of its data sets (MMMU), which no
request here comes from. Where the package is not installed, that import finds an empty module.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NoReturn


def _not_installed(*args: object, **kwargs: object) -> NoReturn:
    raise ModuleNotFoundError("this data set needs the datasets package: pip install datasets")


def provide_datasets() -> None:
    """Let ``from datasets import load_dataset`` pass where there is no such package; calling it
    says what is missing."""
    if importlib.util.find_spec("datasets") is None:
        module = ModuleType("datasets")
        module.__spec__ = ModuleSpec("datasets", loader=None)
        module.load_dataset = _not_installed  # type: ignore[attr-defined]
        sys.modules["datasets"] = module


if __name__ == "__main__":
    # Before: transformers asks which packages there are when it is imported.
    import transformers  # noqa: F401

    provide_datasets()
    runpy.run_module("sglang.benchmark.serving", run_name="__main__", alter_sys=True)
