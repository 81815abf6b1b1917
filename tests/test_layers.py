"""Imports point one way, and heavy libraries stay where they belong."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = [
    {"seeds", "files", "keys", "interrupt"},
    {"schemas", "provenance"},
    {"store", "graphs", "data", "models"},
    {"local", "merge", "regimes", "server", "metrics"},
    {"parts"},
    {"config", "rules", "presets", "checkpoint", "claim"},
    {"blocks", "problems", "schedule"},
    {"heads", "exchange", "formation", "diagnostics"},
    {"rows"},
    {"worker", "cluster", "room"},
    {"pools"},
    {"orchestrator"},
    {"api", "trial", "progress", "options", "search"},
    {"tuning", "sweep"},
    {"cli"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
RAY = {"pools", "cluster", "room", "api", "trial", "progress", "search", "tuning", "sweep"}


def modules():
    return sorted((ROOT / "fedscale").rglob("*.py"))


def part(path: Path) -> str:
    """The top-level module or package of a file, "" for fedscale/__init__.py."""
    inside = path.relative_to(ROOT / "fedscale")
    return inside.parts[0].removesuffix(".py").removesuffix("__init__")


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path):
    here = part(path)
    if not here:
        return
    assert here in LEVEL, f"{here}: give it a layer in this test"
    for name in imports(path):
        words = name.split(".")
        if words[0] != "fedscale" or len(words) < 2 or words[1] not in LEVEL:
            continue
        there = words[1]
        assert LEVEL[there] <= LEVEL[here], f"{here} imports {there}, which stands above it"
    assert not any(name.split(".")[0] == "sweeps" for name in imports(path))


def test_every_module_has_a_layer():
    assert {part(path) for path in modules()} - {""} == set(LEVEL)


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_ray_is_imported_in_few_places(path):
    if any(name.split(".")[0] == "ray" for name in imports(path)):
        assert part(path) in RAY


@pytest.mark.parametrize("path", sorted((ROOT / "analysis").glob("*.py")), ids=lambda p: p.name)
def test_analysis_reads_only_the_store(path):
    ours = {name for name in imports(path) if name.split(".")[0] == "fedscale"}
    assert ours <= {"fedscale", "fedscale.store"} | {
        n for n in ours if n.startswith("fedscale.store.")
    }
    assert not {name.split(".")[0] for name in imports(path)} & {"torch", "ray"}


@pytest.mark.parametrize("path", sorted((ROOT / "sweeps").glob("*.py")), ids=lambda p: p.name)
def test_sweep_scripts_are_short(path):
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    assert len(lines) <= 40
