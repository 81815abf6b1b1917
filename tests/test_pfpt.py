import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Bernoulli, Independent, Normal

from fedscale.merge import pfpt

KEYS = {"loops": 5, "limit": 100, "seed": 0, "round": 1}
NETWORKS = {"seed": 0, "round": 1, "client": 0}


def drawn(sizes, d=6, seed=0, scale=1.0):
    """Return one float32 prompt set per size."""
    rng = np.random.default_rng(seed)
    return [torch.from_numpy(rng.normal(0, scale, (n, d)).astype(np.float32)) for n in sizes]


def padded(sets, fill=0.0, more=0):
    counts = torch.tensor([len(part) for part in sets])
    prompts = torch.full((len(sets), int(counts.max()) + more, sets[0].shape[1]), fill)
    for row, part in zip(prompts, sets, strict=True):
        row[: len(part)] = part
    return prompts, counts


def everyone(m):
    return torch.ones(m, m, dtype=torch.bool)


def sigmoid_network(x, layers):
    first, bias, last, last_bias = layers
    return torch.sigmoid(torch.relu(x @ first.T + bias) @ last.T + last_bias)


def dense_scores(part, candidates, scale, use, c):
    """score[l, i] of the module's docstring by torch.distributions."""
    normal = Independent(Normal(candidates, sigmoid_network(candidates, scale)), 1)
    count = Bernoulli(sigmoid_network(candidates, use)[:, 0])
    return normal.log_prob(part[:, None]) + count.log_prob(c)


def dense_assign(parts, candidates, scale, use, before):
    """All one-to-one assignments tried; `before` holds each client's columns, or None."""
    columns = []
    for place, part in enumerate(parts):
        c = torch.zeros(len(candidates), dtype=torch.float64)
        if before is not None:
            c[list(before[place])] = 1
        found = dense_scores(part, candidates, scale, use, c).detach().numpy()
        every = itertools.permutations(range(len(candidates)), len(part))
        columns.append(max(every, key=lambda chosen: found[np.arange(len(chosen)), chosen].sum()))
    return columns


def dense_merge(sets, loops):
    """The merge without its shortcuts: brute force, distributions, Adam by hand."""
    parts = [part.double() for part in sets]
    phi = torch.cat(parts).requires_grad_()
    scale, use = pfpt.initial_networks(phi.shape[1], **NETWORKS)
    weights = [phi, *scale, *use]
    m, v = [[torch.zeros_like(w) for w in weights] for _ in range(2)]
    columns = dense_assign(parts, phi, scale, use, None)
    for step in range(1, loops + 1):
        score = 0.0
        for part, chosen in zip(parts, columns, strict=True):
            c = torch.zeros(len(phi), dtype=torch.float64)
            c[list(chosen)] = 1
            found = dense_scores(part, phi, scale, use, c)
            score = score + found[torch.arange(len(part)), list(chosen)].sum()
        gradients = torch.autograd.grad(-score, weights)
        with torch.no_grad():
            for w, g, a, b in zip(weights, gradients, m, v, strict=True):
                a.mul_(0.9).add_(0.1 * g)
                b.mul_(0.999).add_(0.001 * g * g)
                w -= 1e-3 * (a / (1 - 0.9**step)) / ((b / (1 - 0.999**step)).sqrt() + 1e-8)
        columns = dense_assign(parts, phi, scale, use, columns)
    return phi.detach()[sorted(set(itertools.chain(*columns)))]


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_the_density_is_the_normal_one(offset):
    w, phi = (part.double() + offset for part in drawn([5, 7]))
    s = torch.rand(7, 6, generator=torch.manual_seed(0)).double() + 0.01
    oracle = Independent(Normal(phi, s), 1).log_prob(w[:, None])
    found = pfpt.log_densities([w[:2], w[2:]], phi, s.log())
    torch.testing.assert_close(torch.cat(found), oracle, rtol=1e-9, atol=1e-7)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("scale", [0.05, 1.0])
def test_the_assignment_is_the_best_of_all(seed, scale):
    """With and without counts; near prompts compete for candidates, far ones keep their own."""
    parts = [part.double() for part in drawn([2, 3, 1], seed=seed, scale=scale)]
    candidates = torch.cat(parts)
    networks = pfpt.initial_networks(6, seed=seed, round=1, client=0)
    before = [(4, 1), (0, 5, 2), (3,)]
    for given_counts in (None, before):
        flat = None if given_counts is None else torch.tensor(sum(given_counts, ()))
        found = pfpt.assign(parts, candidates, *networks, flat)
        best = dense_assign(parts, candidates, *networks, given_counts)
        assert found.tolist() == list(itertools.chain(*best))


def test_counts_decide_between_candidates_that_fit_alike():
    """Log b where c = 1, log(1 − b) where c = 0: at b > 1/2 a client stays, at b < 1/2 it moves."""
    part = torch.zeros(1, 3, dtype=torch.float64)
    candidates = torch.zeros(2, 3, dtype=torch.float64)
    scale, use = pfpt.initial_networks(3, **NETWORKS)
    for bias, expected in [(10.0, 1), (-10.0, 0)]:
        fixed = (*use[:3], torch.full((1,), bias, dtype=torch.float64))
        assert pfpt.assign([part], candidates, scale, fixed, torch.tensor([1])).item() == expected


@pytest.mark.parametrize("loops", [0, 1, 3])
@pytest.mark.parametrize(("scale", "seed"), [(0.02, 13), (0.02, 14), (0.1, 31), (1.0, 0)])
def test_the_merge_is_its_dense_reference(loops, scale, seed):
    """The first three are draws in which the counts change who survives."""
    sets = drawn([2, 1, 3], d=2, seed=seed, scale=scale)
    found = pfpt.merge(sets, loops=loops, **NETWORKS)
    torch.testing.assert_close(found.double(), dense_merge(sets, loops), rtol=0, atol=1e-6)


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    scale=st.sampled_from([1e-3, 0.1, 3.0]),
    loops=st.integers(0, 4),
    seed=st.integers(0, 1000),
)
def test_survivors_are_candidates_moved_by_adam_alone(sizes, scale, loops, seed):
    sets = drawn(sizes, seed=seed, scale=scale)
    found = pfpt.merge(sets, loops=loops, **NETWORKS)
    assert max(sizes) <= len(found) <= sum(sizes)
    gaps = (found[:, None] - torch.cat(sets)[None]).abs().amax(2)
    # |m̂|/√v̂ is at most (1 − β1)/√(1 − β2) < 3.2 from one step to the next.
    assert float(gaps.amin(1).max()) <= 3.2e-3 * loops + 1e-6
    if loops == 0:
        assert len({tuple(row.tolist()) for row in found}) == len(found)


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    scale=st.sampled_from([0.05, 1.0]),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_the_order_of_neighbours_and_of_prompts_changes_the_order_alone(sizes, scale, seed, data):
    sets = drawn(sizes, seed=seed, scale=scale)
    shuffled = [
        part[data.draw(st.permutations(range(len(part))))]
        for part in data.draw(st.permutations(sets))
    ]
    one = pfpt.merge(sets, loops=5, **NETWORKS)
    other = pfpt.merge(shuffled, loops=5, **NETWORKS)
    assert len(one) == len(other)
    gaps = (one[:, None] - other[None]).abs().amax(2)
    assert float(gaps.amin(0).max()) < 1e-6 and float(gaps.amin(1).max()) < 1e-6


@pytest.mark.parametrize("neighbours", [2, 3, 5])
@pytest.mark.parametrize("n", [1, 3, 10])
@pytest.mark.parametrize("d", [1, 6, 33])
def test_identical_neighbours_merge_to_n_survivors(neighbours, n, d):
    prompts, counts = padded(drawn([n], d=d, seed=n) * neighbours)
    merged, sizes = pfpt.merge_neighbourhoods(
        everyone(neighbours), prompts, counts, clients=range(neighbours), **KEYS
    )
    assert sizes.tolist() == [n] * neighbours
    if d > 1:  # on a line, prompts lie so near that two of them may share a value
        gaps = (merged[0][:, None] - prompts[0][None]).abs().amax(2)
        assert float(gaps.amin(0).max()) <= 3.2e-3 * KEYS["loops"]


def test_counts_grow_round_on_round_where_clients_drift_until_the_guard():
    """Figure 5: clients of a ring that drift apart between merges; then the guard."""
    m = 8
    ring = torch.eye(m, dtype=torch.bool)
    for step in (-1, 1):
        ring |= torch.eye(m, dtype=torch.bool).roll(step, 0)
    prompts, counts = padded(drawn([2] * m))
    means = [2.0]
    generator = torch.manual_seed(0)
    keys = {**KEYS, "limit": 60}
    for round in range(1, 4):
        prompts = prompts + torch.randn(prompts.shape, generator=generator)
        prompts, counts = pfpt.merge_neighbourhoods(
            ring, prompts, counts, clients=range(m), **{**keys, "round": round}
        )
        means.append(float(counts.double().mean()))
    assert all(after > 2 * before for before, after in itertools.pairwise(means))
    with pytest.raises(pfpt.TooManyPrompts) as caught:
        prompts = prompts + torch.randn(prompts.shape, generator=generator)
        pfpt.merge_neighbourhoods(
            ring, prompts, counts, clients=range(m), **{**keys, "round": 4, "limit": 60}
        )
    message = str(caught.value)
    assert message.startswith("prompts.limit=60: client 0 has ") and "\n" not in message
    assert "round 4" in message and isinstance(caught.value, ValueError)


def test_the_guard_allows_the_limit_itself():
    sets = drawn([3, 4])
    prompts, counts = padded(sets)
    _, sizes = pfpt.merge_neighbourhoods(
        everyone(2), prompts, counts, clients=range(2), **{**KEYS, "limit": 7}
    )
    assert sizes.tolist() == [7, 7]
    with pytest.raises(pfpt.TooManyPrompts, match=r"limit=6: client 0 has 7 prompts .* round 1"):
        pfpt.merge_neighbourhoods(
            everyone(2), prompts, counts, clients=range(2), **{**KEYS, "limit": 6}
        )


@pytest.mark.parametrize("fill", [7.0, torch.nan, torch.inf])
def test_padding_never_counts(fill):
    sets = drawn([3, 2, 4])
    support = torch.tensor([[True, True, False], [True, True, True], [False, True, True]])
    keys = {"clients": range(3), **KEYS}
    plain, sizes = pfpt.merge_neighbourhoods(support, *padded(sets), **keys)
    other, same = pfpt.merge_neighbourhoods(support, *padded(sets, fill, more=3), **keys)
    assert sizes.tolist() == same.tolist() == [5, 9, 6] and sizes.dtype == torch.int64
    assert torch.equal(plain, other) and plain.shape == (3, 9, 6)
    for row, size in zip(plain, sizes.tolist(), strict=True):
        assert not row[size:].any() and row[:size].abs().amax(1).min() > 0


def test_a_result_depends_on_its_key_and_its_neighbourhood_alone():
    prompts, counts = padded(drawn([3, 2, 4, 5], scale=0.05))
    support = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 0], [0, 1, 1, 1], [1, 0, 1, 1]]).bool()
    keys = {"clients": range(4), **KEYS}
    whole, sizes = pfpt.merge_neighbourhoods(support, prompts, counts, **keys)
    with torch.no_grad():
        again, _ = pfpt.merge_neighbourhoods(support, prompts, counts, **keys)
    assert torch.equal(whole, again) and not whole.requires_grad
    for client in (2, 0):
        alone, size = pfpt.merge_neighbourhoods(
            support[[client]], prompts, counts, clients=[client], **KEYS
        )
        assert torch.equal(alone[0], whole[client, : int(sizes[client])])
        assert size.tolist() == [alone.shape[1]]
    sets = drawn([3, 3])
    base = pfpt.merge(sets, loops=5, **NETWORKS)
    for change in ("seed", "round", "client"):
        other = pfpt.merge(sets, loops=5, **{**NETWORKS, change: 2})
        assert other.shape != base.shape or not torch.equal(other, base)


def test_an_isolated_client_keeps_its_prompts_bit_for_bit():
    sets = drawn([3, 2, 4, 1])
    sets[0][1, 2], sets[0][2, 3] = torch.nan, -0.0
    prompts, counts = padded(sets)
    counts[3] = 0  # nobody's neighbour: what a worker pads with
    support = torch.tensor([[True, False, False, False], [False, True, True, False]])
    merged, sizes = pfpt.merge_neighbourhoods(support, prompts, counts, clients=[0, 1], **KEYS)
    assert sizes.tolist() == [3, 6]
    assert merged[0, :3].numpy().tobytes() == sets[0].numpy().tobytes()
    merged[0, 0, 0] = 5.0
    assert prompts[0, 0, 0] != 5.0


def test_types_and_no_rows_at_all():
    for dtype in (torch.float64, torch.bfloat16):
        prompts, counts = padded(drawn([2, 2]))
        merged, _ = pfpt.merge_neighbourhoods(
            everyone(2), prompts.to(dtype), counts.int(), clients=range(2), **KEYS
        )
        assert merged.dtype == dtype
    none, sizes = pfpt.merge_neighbourhoods(
        torch.zeros(0, 2, dtype=torch.bool), prompts, counts, clients=[], **KEYS
    )
    assert none.shape == (0, 0, 6) and sizes.shape == (0,)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_diverged_neighbour_is_named(value):
    prompts, counts = padded(drawn([3, 4]))
    prompts[1, 3, 0] = value
    with pytest.raises(ValueError, match="client 1 in round 1 are not finite"):
        pfpt.merge_neighbourhoods(everyone(2), prompts, counts, clients=range(2), **KEYS)


def test_large_prompts_merge_or_are_refused_in_one_line():
    for size in 10.0 ** np.arange(-45, 39, 3):
        prompts, counts = padded(drawn([3, 4], scale=float(size)))
        try:
            merged, sizes = pfpt.merge_neighbourhoods(
                everyone(2), prompts, counts, clients=range(2), **KEYS
            )
            assert merged.isfinite().all() and sizes.min() >= 4
        except ValueError as error:
            assert size > 100 and "\n" not in str(error) and "client 0 in round 1" in str(error)


BAD = {
    "support: client 0 is not in its own": {"support": ~torch.eye(2, dtype=torch.bool)},
    "support: client 2 is not": {"clients": [0, 2]},
    "support: client -1 is not": {"clients": [0, -1]},
    "allowed are .C, M. bool": {"clients": [0]},
    "int64, prompts .*: allowed are .C, M. bool": {"support": torch.ones(2, 2, dtype=torch.int64)},
    r"prompts \(2, 4\)": {"prompts": torch.zeros(2, 4)},
    r"prompts \(2, 4, 0\)": {"prompts": torch.zeros(2, 4, 0)},
    r"counts \(3,\)": {"counts": torch.ones(3, dtype=torch.int64)},
    r"counts \(2,\) torch.float32": {"counts": torch.ones(2)},
    "counts: client 1 has 0; allowed are 1 to 4": {"counts": torch.tensor([3, 0])},
    "counts: client 0 has 5; allowed are 1 to 4": {"counts": torch.tensor([5, 4])},
    "loops=-1": {"loops": -1},
    "prompts.limit=0: allowed are whole": {"limit": 0},
    "seed, round and client": {"seed": -1},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_one_line(message):
    prompts, counts = padded(drawn([3, 4]))
    keys = {"support": everyone(2), "prompts": prompts, "counts": counts, "clients": range(2)}
    with pytest.raises(ValueError, match=message) as caught:
        pfpt.merge_neighbourhoods(**{**keys, **KEYS, **BAD[message]})
    assert "\n" not in str(caught.value)
