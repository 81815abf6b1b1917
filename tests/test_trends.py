"""Orders that the papers draw, as they stand at a small size; the README has the measured ones."""

import numpy as np
import pytest
from test_methods import finish
from test_methods import run as start

from fedscale.presets import preset

KEYS = {
    "data.train_size": 60,
    "data.test_size": 20,
    "rounds": 6,
    "eval_every": 6,
    "local.epochs": 1,
    "precision": "float32",
}


def consensus(method, seed, **keys):
    found = finish(start(preset(method, "offline", {**KEYS, "seed": seed, **keys})))
    return found.tables["rounds"][-1]["consensus_error"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dfrost", "davg_adam_pt"])
def test_sparser_graphs_leave_clients_further_apart(method):
    """D-FROST, figure 8: ring with failing links > ring > grid; and the complete graph has 0."""
    order = (
        {"graph.name": "ring", "graph.link_drop": 0.2},
        {"graph.name": "ring"},
        {"graph.name": "grid"},
        {"graph.name": "complete"},
    )
    means = [np.mean([consensus(method, seed, **keys) for seed in (0, 1, 2)]) for keys in order]
    assert means == sorted(means, reverse=True)
    assert means[-1] < 1e-9 < means[-2]
