"""Imports go one way: deploy -> cluster -> {scheduler, workers}. Read from the source, so that no import is missed
because it is inside a function or only for type checking."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("scheduler", "workers", "cluster", "deploy")

MAY_IMPORT = {
    "scheduler": {"scheduler"},
    "workers": {"workers", "scheduler"},
    "cluster": {"cluster", "workers", "scheduler"},
    "deploy": {"deploy", "cluster", "workers", "scheduler"},
}
WIRE_TYPES = {"scheduler.plan", "scheduler.codec", "scheduler.sampling", "scheduler.request", "scheduler.errors"}
SCHEDULER_LIBRARIES = {"msgpack"}
IMPURE = {
    "asyncio", "concurrent", "datetime", "http", "io", "logging", "multiprocessing", "os", "pathlib", "random",
    "secrets", "shutil", "signal", "socket", "subprocess", "sys", "tempfile", "threading", "time", "urllib",
}  # fmt: skip
IMPURE_CALLS = {"open", "print", "input", "__import__"}


def imports(source: str) -> set[str]:
    """Full names of all modules that are imported anywhere in the source."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the layer"
            module = node.module or ""
            found.add(module)
            if module in PACKAGES:  # `from scheduler import plan` names a module of it
                found.update(f"{module}.{name.name}" for name in node.names)
    return found


def allowed(package: str, name: str, top: str) -> bool:
    if top in PACKAGES and top not in MAY_IMPORT[package]:
        return False
    if package == "workers":
        return top != "ray" and (top != "scheduler" or name in WIRE_TYPES)
    if package == "scheduler" and top not in PACKAGES:
        return top in SCHEDULER_LIBRARIES or (top in sys.stdlib_module_names and top not in IMPURE)
    return True


def violations(package: str, source: str) -> list[str]:
    """What the source of a module of `package` imports or calls and must not."""
    wrong = [name for name in sorted(imports(source)) if not allowed(package, name, name.split(".")[0])]
    if package == "scheduler":
        calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
        wrong += [call.func.id for call in calls if isinstance(call.func, ast.Name) and call.func.id in IMPURE_CALLS]
    return wrong


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_one_way(package: str) -> None:
    modules = sorted((ROOT / package).rglob("*.py"))
    assert modules
    wrong = {str(path.relative_to(ROOT)): violations(package, path.read_text(encoding="utf-8")) for path in modules}
    assert {path: names for path, names in wrong.items() if names} == {}


@pytest.mark.parametrize(
    ("package", "source", "found"),
    [
        ("scheduler", "import torch", ["torch"]),
        ("scheduler", "def f():\n    import ray", ["ray"]),
        ("scheduler", "from time import monotonic", ["time"]),
        ("scheduler", "from workers.config import WorkerConfig", ["workers.config"]),
        ("scheduler", "print('hello')", ["print"]),
        ("scheduler", "import numpy as np", ["numpy"]),
        ("workers", "import ray", ["ray"]),
        ("workers", "from ray.util import placement_group", ["ray.util"]),
        ("workers", "from scheduler.scheduler import Scheduler", ["scheduler.scheduler"]),
        ("workers", "from scheduler import policies", ["scheduler", "scheduler.policies"]),
        ("workers", "from cluster.config import EngineConfig", ["cluster.config"]),
        ("cluster", "from deploy.app import build_app", ["deploy.app"]),
        ("cluster", "if TYPE_CHECKING:\n    import deploy.cli", ["deploy.cli"]),
        ("scheduler", "import math\nimport msgpack\nfrom scheduler.plan import Segment", []),
        ("workers", "import torch\nfrom scheduler.plan import Segment", []),
        ("deploy", "import ray\nfrom cluster.config import EngineConfig", []),
    ],
)
def test_the_check_finds_what_it_is_for(package: str, source: str, found: list[str]) -> None:
    assert violations(package, source) == found


def test_who_gives_orders_needs_no_torch() -> None:
    """Its import takes seconds, which count where a scheduler or a front end is started again."""
    program = (
        "import sys, cluster.scheduler_actor, cluster.client, deploy.app; "
        "print(sorted({'torch', 'transformers', 'numba'} & sys.modules.keys()))"
    )
    told = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"
