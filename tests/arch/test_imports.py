"""Holds the layer table of WORKSPACE.md: imports go downward only."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("jaxinfer", "jaxinfer_kernels", "jaxinfer_checkpoints")
SOURCES = (ROOT, ROOT / "kernels", ROOT / "checkpoints")
MAX_LINES = 500

# The longest matching prefix gives a module's layer.
LAYERS = {
    "jaxinfer.serve": 7,
    "jaxinfer.generate": 7,
    "jaxinfer.batch": 7,
    "jaxinfer.plan": 7,
    "jaxinfer.bench": 7,
    "jaxinfer.convert": 7,
    "jaxinfer.llm": 7,
    "jaxinfer.flags": 7,
    "jaxinfer.flag_definitions": 7,
    "jaxinfer.cli": 7,
    "jaxinfer.server": 7,
    "jaxinfer.engine.async_engine": 6,
    "jaxinfer.engine.engine": 6,
    "jaxinfer.engine.resolve": 5,
    "jaxinfer.engine.compilation": 5,
    "jaxinfer.engine.handover": 5,
    "jaxinfer.engine.hollow": 5,
    "jaxinfer.engine.outputs": 5,
    "jaxinfer.engine.preflight": 5,
    "jaxinfer.engine.prepare": 5,
    "jaxinfer.engine.cpu_kernels": 5,
    "jaxinfer.engine.programs": 5,
    "jaxinfer.engine.runner": 5,
    "jaxinfer.engine.scheduler": 5,
    "jaxinfer.engine.step_batch": 5,
    "jaxinfer.text": 5,
    "jaxinfer.metrics": 5,
    "jaxinfer.memory": 5,
    "jaxinfer.models.transformer": 4,
    "jaxinfer.models.weights": 4,
    "jaxinfer.models.layers": 3,
    "jaxinfer.models.moe": 3,
    "jaxinfer.models.families": 3,
    "jaxinfer.models.weight_names": 3,
    "jaxinfer.models.rope_scaling": 3,
    "jaxinfer.ops": 3,
    "jaxinfer.engine.host_memory": 3,
    "jaxinfer.engine.kv_cache": 3,
    "jaxinfer.engine.page_pool": 3,
    "jaxinfer.engine.prefix_cache": 3,
    "jaxinfer.engine.seq_group": 3,
    "jaxinfer.parallel": 2,
    "jaxinfer.config": 1,
    "jaxinfer.types": 1,
    "jaxinfer_kernels": 0,
    "jaxinfer_checkpoints": 0,
}
# Re-export their packages' names and decide nothing, so they have no layer of their own.
FACADES = {"jaxinfer", "jaxinfer.engine", "jaxinfer.models"}
JAX_FREE = (
    "jaxinfer",
    "jaxinfer.config",
    "jaxinfer.types",
    "jaxinfer.parallel.cluster",
    "jaxinfer.parallel.hosts",
    "jaxinfer.parallel.layout",
    "jaxinfer.parallel.stages",
    "jaxinfer.engine.page_pool",
    "jaxinfer.engine.prefix_cache",
    "jaxinfer.engine.scheduler",
    "jaxinfer.engine.seq_group",
    "jaxinfer.text",
    "jaxinfer_checkpoints",
)
ENTRY_POINTS = {f"jaxinfer.{n}" for n in ("serve", "generate", "batch", "plan", "bench", "convert")}


@cache
def modules() -> dict[str, Path]:
    """Dotted name -> file, of every module of the three packages."""
    found = {}
    for source, package in zip(SOURCES, PACKAGES, strict=True):
        for path in sorted((source / package).rglob("*.py")):
            parts = path.relative_to(source).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_text(encoding="utf-8"))


def layer(module: str) -> int:
    prefix = module
    while prefix not in LAYERS:
        assert "." in prefix, f"{module} has no layer: add it to LAYERS here and to WORKSPACE.md"
        prefix = prefix.rpartition(".")[0]
    return LAYERS[prefix]


def imported_names(module: str) -> Iterator[str]:
    """Absolute dotted names that the module imports, at any depth of its code."""
    is_package = modules()[module].name == "__init__.py"
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                kept = parts[: len(parts) - node.level + is_package]
                base = ".".join([*kept, base] if base else kept)
            yield from (f"{base}.{alias.name}" for alias in node.names)


def own_imports(module: str) -> set[str]:
    """The modules of ours that it imports: `from a.b import c` is a.b.c if that is one, else a.b."""
    ours = set()
    for name in imported_names(module):
        if name.split(".")[0] in PACKAGES:
            while name not in modules():
                assert "." in name, f"{module} imports {name}, which does not exist"
                name = name.rpartition(".")[0]
            ours.add(name)
    return ours - {module}


def test_imports_go_downward() -> None:
    upward = [
        f"{module} (layer {layer(module)}) imports {name} (layer {layer(name)})"
        for module in modules()
        if module not in FACADES
        for name in own_imports(module) - FACADES
        if layer(name) > layer(module)
    ]
    assert upward == []


def test_nothing_imports_the_facades() -> None:
    """`from jaxinfer import LLM` is for users: inside, the facade would hide a module's true layer."""
    assert [(m, n) for m in modules() for n in own_imports(m) & FACADES if m not in FACADES] == []


def test_imports_have_no_cycle() -> None:
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"import cycle: {' -> '.join([*path, module])}"
        if module not in done:
            for name in own_imports(module) - FACADES:
                visit(name, (*path, module))
            done.add(module)

    for module in modules():
        if module not in FACADES:
            visit(module, ())


def test_kernels_and_checkpoints_stand_alone() -> None:
    strangers = [
        (module, name)
        for module in modules()
        if layer_zero(module)
        for name in own_imports(module)
        if name.split(".")[0] != module.split(".")[0]
    ]
    assert strangers == []


def layer_zero(module: str) -> bool:
    return module.split(".")[0] != "jaxinfer"


def test_scheduler_and_runner_meet_only_in_types() -> None:
    assert "jaxinfer.engine.runner" not in own_imports("jaxinfer.engine.scheduler")
    assert "jaxinfer.engine.scheduler" not in own_imports("jaxinfer.engine.runner")


def test_jax_free_modules_import_without_jax() -> None:
    names = [m for m in modules() if any(m == j or m.startswith(f"{j}.") for j in JAX_FREE[1:])]
    names.append("jaxinfer")
    code = (
        "import sys\n"
        f"sys.path[:0] = {[str(s) for s in SOURCES]!r}\n"
        "sys.modules.update(dict.fromkeys(('jax', 'jaxlib', 'flax')))\n"
        "import importlib\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("module", sorted(modules()))
def test_only_flags_reads_flags_and_environment(module: str) -> None:
    if module == "jaxinfer.flags":
        return
    for node in ast.walk(tree(module)):
        if not isinstance(node, ast.Attribute):
            continue
        text = ast.unparse(node)
        assert text not in {"os.environ", "os.getenv", "flags.FLAGS"}, f"{module}:{node.lineno} reads {text}"
    assert not {"os.environ", "os.getenv", "absl.flags.FLAGS"} & set(imported_names(module))


@pytest.mark.parametrize("module", sorted(modules()))
def test_library_does_not_print(module: str) -> None:
    if module in ENTRY_POINTS:
        return
    calls = (n for n in ast.walk(tree(module)) if isinstance(n, ast.Call))
    assert [c.lineno for c in calls if isinstance(c.func, ast.Name) and c.func.id == "print"] == []


@pytest.mark.parametrize("module", sorted(modules()))
def test_files_are_short(module: str) -> None:
    assert len(modules()[module].read_text(encoding="utf-8").splitlines()) < MAX_LINES
