"""Every sweep script: its grid is valid at both scales, and asks for each run once."""

import importlib.util
from pathlib import Path

import pytest

from fedscale.sweep import Request, Sweep
from fedscale.tuning import Plan

SCRIPTS = sorted((Path(__file__).parent.parent / "sweeps").glob("*.py"))


def load(path) -> Sweep:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.SWEEP


@pytest.mark.parametrize("scale", ["offline", "paper"])
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_the_grid_is_valid(path, scale):
    sweep = load(path)
    assert sweep.name == path.stem
    request = Request(scale=scale, seeds=sweep.seeds, address="local")
    plan = Plan.make(sweep, request)
    assert len(sweep.seeds) >= 2, "a spread needs two seeds"
    assert len(plan.run_ids) == len(plan.grid), "two points of the grid are one run"
    values = 1
    for axis in sweep.space.values():
        values *= len(axis.grid)
    points = len(sweep.methods) * max(1, len(sweep.cases_at(scale))) * values
    assert len(plan.grid) == (points + len(sweep.references)) * len(sweep.seeds)
    assert all(config.scale == scale for config, _ in plan.grid)
