"""Above ``dcut_sglang/host``, nothing needs sglang; importing the package loads nothing heavy."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import dcut_sglang

PACKAGE = Path(dcut_sglang.__file__).parent
PURE_FILES = sorted(
    path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] != "host"
)

# torchvision is hidden too: PyPI's build does not import beside a CPU build of torch, and
# transformers imports it where it is installed.
IMPORT_WITHOUT_SGLANG = """
import importlib, json, sys

class Hide:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        hidden = name.partition(".")[0] in ("sglang", "torchvision")
        return None if hidden else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Hide(finder) for finder in sys.meta_path]
failures = {}
for name in ["sglang", *json.loads(sys.argv[1])]:
    try:
        importlib.import_module(name)
    except BaseException as error:
        failures[name] = repr(error)
host = [name for name in sys.modules if name.startswith("dcut_sglang.host")]
print(json.dumps({"failures": failures, "host": host}))
"""


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(tree: ast.AST) -> list[str]:
    """Absolute names of everything imported anywhere in a file, also inside functions."""
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.append(node.module or "")
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if name in ("import_module", "__import__"):
                names.append(str(node.args[0].value))
    return names


def run_python(code: str, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_module_outside_host_imports_without_sglang() -> None:
    names = [module_name(path) for path in PURE_FILES]
    assert "dcut_sglang.survival" in names
    result = json.loads(run_python(IMPORT_WITHOUT_SGLANG, json.dumps(names)).splitlines()[-1])
    assert "No module named 'sglang'" in result["failures"].pop("sglang")
    assert result == {"failures": {}, "host": []}


@pytest.mark.parametrize("path", PURE_FILES, ids=module_name)
def test_no_file_outside_host_imports_sglang(path: Path) -> None:
    names = imported_names(ast.parse(path.read_text()))
    assert [name for name in names if name.partition(".")[0] == "sglang"] == []


@pytest.mark.parametrize(
    "code",
    [
        "import sglang",
        "import os, sglang.srt as s",
        "def f():\n    from sglang.srt.utils import x",
        "import importlib\nimportlib.import_module('sglang.srt')",
    ],
)
def test_the_check_sees_every_form_of_import(code: str) -> None:
    assert any(name.partition(".")[0] == "sglang" for name in imported_names(ast.parse(code)))


def test_importing_the_package_is_light() -> None:
    out = run_python("import sys, dcut_sglang; print(*sorted({'torch', 'numpy'} & {*sys.modules}))")
    assert out.split() == []
