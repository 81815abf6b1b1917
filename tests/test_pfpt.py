import itertools

import numpy as np
import pytest
import torch
from torch.distributions import Normal

from fedscale.merge import pfpt

KEYS = {"loops": 5, "limit": 100, "seed": 0, "round": 1}


def stacked(sizes, d=6, seed=0):
    rng = np.random.default_rng(seed)
    prompts = torch.zeros(len(sizes), max(sizes), d)
    for row, size in zip(prompts, sizes, strict=True):
        row[:size] = torch.from_numpy(rng.normal(size=(size, d)).astype(np.float32))
    return prompts, torch.tensor(sizes)


def test_scores_are_the_normal_density():
    prompts, _ = stacked([3, 4])
    scale, _ = pfpt._networks(6, 0, 1, 0)
    found = pfpt.scores(prompts[0, :3], prompts[1], scale).detach()
    s = torch.sigmoid(pfpt._mlp(prompts[1], scale)).detach()
    for row, column in itertools.product(range(3), range(4)):
        density = Normal(prompts[1, column], s[column]).log_prob(prompts[0, row]).sum()
        assert float(found[row, column]) == pytest.approx(float(density), rel=1e-4)


@pytest.mark.parametrize("seed", range(5))
def test_the_assignment_is_the_best_of_all(seed):
    """Client after client: brute force over all one-to-one assignments."""
    prompts, _ = stacked([2, 3], seed=seed)
    sets = [prompts[0, :2], prompts[1, :3]]
    candidates = torch.cat(sets)
    scale, use = pfpt._networks(6, seed, 1, 0)
    rows, columns = pfpt.assign(sets, candidates, scale, use)
    b = torch.sigmoid(pfpt._mlp(candidates, use)[:, 0])
    taken, done = set(), 0
    for part in sets:
        prior = torch.stack(
            [b[i].log() if i in taken else (1 - b[i]).log() for i in range(len(candidates))]
        )
        found = (pfpt.scores(part, candidates, scale) + prior).detach()
        best = max(
            sum(float(found[row, column]) for row, column in enumerate(chosen))
            for chosen in itertools.permutations(range(len(candidates)), len(part))
        )
        own = columns[done : done + len(part)]
        total = sum(float(found[row, int(column)]) for row, column in enumerate(own))
        assert total == pytest.approx(best, rel=1e-5)
        assert len(set(own.tolist())) == len(part)
        taken |= set(own.tolist())
        done += len(part)
    assert rows.tolist() == [0, 1, 2, 3, 4]


def test_counts_grow_where_neighbours_differ_and_padding_never_counts():
    prompts, counts = stacked([3, 2, 4])
    support = torch.tensor([[True, True, False], [True, True, True], [False, True, True]])
    merged, sizes = pfpt.merge_neighbourhoods(support, prompts, counts, clients=range(3), **KEYS)
    assert sizes.tolist() == [5, 9, 6]
    for row, size in zip(merged, sizes, strict=True):
        assert not row[size:].any() and (row[:size].abs().sum(1) > 0).all()
    wide = torch.nn.functional.pad(prompts, (0, 0, 0, 5))
    other, _ = pfpt.merge_neighbourhoods(support, wide, counts, clients=range(3), **KEYS)
    assert torch.equal(other, merged)


def test_equal_neighbours_share_candidates():
    prompts, counts = stacked([4, 4])
    prompts[1] = prompts[0]
    support = torch.ones(2, 2, dtype=torch.bool)
    _, sizes = pfpt.merge_neighbourhoods(support, prompts, counts, clients=range(2), **KEYS)
    assert (sizes >= 4).all() and (sizes <= 8).all()


def test_a_client_alone_keeps_its_prompts_and_nobody_depends_on_the_call():
    prompts, counts = stacked([3, 2, 4])
    support = torch.tensor([[True, False, False], [False, True, True], [False, True, True]])
    whole, sizes = pfpt.merge_neighbourhoods(support, prompts, counts, clients=range(3), **KEYS)
    assert torch.equal(whole[0, :3], prompts[0, :3]) and sizes[0] == 3
    one, size = pfpt.merge_neighbourhoods(support[2:], prompts, counts, clients=[2], **KEYS)
    assert torch.equal(one[0, : size[0]], whole[2, : sizes[2]])


def test_the_guard_names_round_client_and_limit():
    prompts, counts = stacked([3, 4])
    support = torch.ones(2, 2, dtype=torch.bool)
    with pytest.raises(pfpt.TooManyPrompts, match=r"round 1, client 0: 7 .* prompts\.limit=6"):
        pfpt.merge_neighbourhoods(
            support, prompts, counts, clients=range(2), **{**KEYS, "limit": 6}
        )


def test_a_diverged_client_is_named():
    prompts, counts = stacked([3, 4])
    prompts[1, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="client 1 is not finite"):
        pfpt.merge_neighbourhoods(
            torch.ones(2, 2, dtype=torch.bool), prompts, counts, clients=range(2), **KEYS
        )
