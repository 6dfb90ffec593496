"""Find the package that one of these stand-ins hides, further down ``sys.path``."""

import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType


def load(name: str, usable: Callable[[ModuleType], bool] = lambda module: True) -> bool:
    """Import the package ``name`` that is no stand-in of ours, replacing the stand-in.

    Returns whether it did. Where there is none, or it does not import, or it is not
    ``usable``, the stand-in stays in ``sys.modules``.
    """
    # Another checkout's stand-ins may be on the path as well.
    path = [entry for entry in sys.path if not Path(entry or ".", Path(__file__).name).exists()]
    spec = PathFinder.find_spec(name, path)
    if spec is None or spec.loader is None:
        return False
    stand_in = sys.modules[name]
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        if usable(module):
            return True
    except (ImportError, OSError) as error:
        print(f"dcut_sglang: using its CPU stand-in for {name} ({error})", file=sys.stderr)
    sys.modules[name] = stand_in
    return False
