"""Blocks: joining ragged ones, what is sent, what is remembered."""

import numpy as np
import pytest
import torch

from fedscale import blocks
from fedscale.local.cohort import Memory
from fedscale.presets import preset


def test_ragged_blocks_are_padded_and_missing_ones_are_zero():
    one = {"prompts": np.ones((2, 3, 4), np.float32), "prompts.count": np.array([3, 2])}
    two = {"prompts": np.full((1, 5, 4), 2, np.float32), "prompts.count": np.array([5])}
    layout = [range(0, 2), range(2, 3), range(3, 5)]
    whole = blocks.join(layout, [one, two, None])
    assert whole["prompts"].shape == (5, 5, 4)
    assert whole["prompts"][0, :3].all() and not whole["prompts"][0, 3:].any()
    assert (whole["prompts"][2] == 2).all() and not whole["prompts"][3:].any()
    assert blocks.message_bytes(one, ["prompts"]) == pytest.approx(2.5 * 4 * 4)
    assert blocks.prompt_counts(two, 1).tolist() == [5]


def test_what_is_sent_depends_on_the_head():
    block = {
        "prompts": np.zeros((1, 2, 3)),
        "head.weight": np.zeros((1, 4, 3)),
        "stats.gram": np.zeros((1, 6)),
        "kept.steps": np.zeros(1),
    }
    assert blocks.sent(preset("dfrost"), block) == ["prompts", "head.weight", "stats.gram"]
    assert blocks.sent(preset("fedopal"), block) == ["prompts", "stats.gram"]
    local = preset("dfrost", **{"merge.head": "local"})
    assert blocks.sent(local, block) == ["prompts", "stats.gram"]
    assert list(blocks.owned(block)) == ["prompts", "head.weight"]
    assert list(blocks.statistics(block)) == ["stats.gram"]


def test_equal_models_are_found():
    block = {"a": np.array([[1.0], [2.0], [1.0], [3.0]]), "b": np.zeros((4, 2))}
    first, where = blocks.distinct(block)
    assert first.tolist() == [0, 1, 3] and where.tolist() == [0, 1, 0, 2]


@pytest.mark.parametrize(("restart", "carry"), [(False, False), (True, True)])
def test_memory_comes_back_with_the_right_anchor(restart, carry):
    memory = Memory({"a": torch.ones(2, 3)}, {"0.a": torch.full((2, 3), 5.0)}, torch.tensor([4, 6]))
    block = blocks.remember(memory)
    now = {"a": torch.zeros(2, 3)}
    found = blocks.recall(block, now, restart, carry, "cpu")
    assert torch.equal(found.moments["0.a"], memory.moments["0.a"])
    assert found.steps.tolist() == [4, 6]
    assert torch.equal(found.anchor["a"], now["a"] if restart else memory.anchor["a"])


def test_a_regime_that_restarts_forgets():
    memory = Memory({}, {"0.a": torch.ones(1)}, torch.tensor([1]))
    assert blocks.recall(blocks.remember(memory), {}, True, False, "cpu") is None
    assert blocks.recall({"a": np.zeros(1)}, {}, False, True, "cpu") is None
