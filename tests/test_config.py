"""Configurations as values: identity, overrides, layout; and that every choice is implemented."""

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedscale import config as cfg
from fedscale import parts
from fedscale.config import ConfigError, RunConfig, from_json, gpu_share
from fedscale.data import catalogue, partition
from fedscale.graphs import topology
from fedscale.local import optimizers
from fedscale.merge import ot
from fedscale.models import backbone
from fedscale.presets import METHODS, preset, scales


@pytest.mark.parametrize("scale", scales())
@pytest.mark.parametrize("method", METHODS)
def test_presets_are_valid_and_survive_json(method, scale):
    c = preset(method, scale)
    assert c.method == method and c.scale == scale
    assert from_json(c.json_text()) == c
    assert json.loads(c.json_text())["merge"]["epsilon"] == c.merge.epsilon


def test_paper_scale_is_the_papers():
    c = preset("dfrost", "paper")
    assert (c.data.name, c.data.clients, c.graph.degree, c.rounds) == ("five", 50, 5, 40)
    assert (c.backbone.name, c.prompts.count) == ("vit_b32", 10)
    assert (c.local.optimizer, c.local.lr, c.local.epochs, c.local.batch_size) == (
        "adam",
        1e-4,
        5,
        16,
    )
    assert (c.merge.epsilon, c.merge.sigma2, c.merge.lam, c.merge.steps) == (0.01, 1, 0.001, 50)
    assert preset("dpsgd_pt", "paper").local.epochs == 1
    assert preset("dfedavgm_pt", "paper").local.momentum == 0.99


def test_choices_are_the_implementations():
    assert cfg.choices(parts.DataConfig, "partition") == tuple(partition.PARTITIONS)
    assert cfg.choices(parts.GraphConfig, "name") == tuple(topology.TOPOLOGIES)
    assert set(cfg.choices(parts.BackboneConfig, "name")) == {*backbone.BACKBONES, "cnn"}
    for name in cfg.choices(parts.LocalConfig, "optimizer"):
        optimizers.build(name, momentum=0.0)
    assert cfg.choices(parts.MergeConfig, "schedule") == ot.SCHEDULES
    assert set(METHODS) >= {"dfrost", "davg_adam_pt", "dfedavgm_pt", "dpsgd_pt"}
    assert preset("dfrost").data.name in catalogue.CATALOGUE


def test_run_id_is_the_run_not_its_layout():
    c = preset("dfrost")
    for layout in ({"workers": 2}, {"clients_per_worker": 5}, {"gpus_per_worker": 0}):
        assert c.replace(layout).run_id == c.run_id
    for change in ({"seed": 1}, {"merge.epsilon": 0.02}, {"rounds": 3}, {"data.alpha": 0.3}):
        assert c.replace(change).run_id != c.run_id


def test_run_id_is_the_same_in_every_process():
    code = "import fedscale; print(fedscale.preset('dfrost', 'offline', seed=3).run_id)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == preset("dfrost", "offline", seed=3).run_id


def test_leaves_are_typed_and_never_none():
    flat = RunConfig().flat()
    assert set(flat) == set(cfg.KEYS)
    assert all(type(value) in (int, float, str, bool) for value in flat.values())


def test_words_and_values_mean_the_same():
    typed = preset("dfrost", "offline", rounds=6, **{"merge.epsilon": 0.1, "graph.resample": False})
    words = cfg.parse_overrides(["rounds=6", "merge.epsilon=1e-1", "graph.resample=false"])
    assert preset("dfrost", "offline", words) == typed


def test_configurations_are_frozen():
    with pytest.raises(Exception, match="frozen"):
        preset("dfrost").merge.epsilon = 1.0
    with pytest.raises(ConfigError, match=r"merge\.epsilon=-1"):
        preset("dfrost").replace({"merge.epsilon": -1})


@settings(deadline=None, max_examples=50)
@given(clients=st.integers(4, 60), workers=st.integers(0, 60))
def test_blocks_cover_all_clients_once(clients, workers):
    keys = {"data.clients": clients, "graph.name": "ring", "workers": workers}
    if workers > clients:
        with pytest.raises(ConfigError, match="workers="):
            preset("dfrost", "offline", keys)
        return
    blocks = preset("dfrost", "offline", keys).blocks()
    assert [c for block in blocks for c in block] == list(range(clients))
    assert len(blocks) == max(workers, 1) and min(map(len, blocks)) >= 1


@settings(deadline=None, max_examples=50)
@given(per=st.integers(1, 60), clients=st.integers(4, 60))
def test_clients_per_worker_bounds_every_block(per, clients):
    keys = {"data.clients": clients, "graph.name": "ring", "clients_per_worker": per}
    blocks = preset("dfrost", "offline", keys).blocks()
    assert [c for block in blocks for c in block] == list(range(clients))
    assert max(map(len, blocks)) <= per


@pytest.mark.parametrize(
    ("asked", "given"),
    list(
        {
            "0": 0,
            "1": 1,
            "2": 2,
            "0.5": 0.5,
            "0.4": 0.3333,
            "0.3333": 0.3333,
            "0.25": 0.25,
            "0.18": 0.1666,
            "0.6": 0.5,
            "auto": -1,
        }.items()
    ),
)
def test_gpu_shares_pack(asked, given):
    assert gpu_share(asked) == pytest.approx(given, abs=1e-12)
