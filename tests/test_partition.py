"""Partitions: every sample in one place, the same everywhere, and the shape each one promises."""

import hashlib
import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ks_2samp

from fedscale.data import partition, shares

HERE = Path(__file__).parent
quick = settings(deadline=None, max_examples=60)


@st.composite
def cases(draw):
    """Labels that are neither contiguous nor balanced, and a number of clients."""
    values = draw(st.lists(st.integers(-50, 900), min_size=1, max_size=8, unique=True))
    sizes = draw(st.lists(st.integers(1, 40), min_size=len(values), max_size=len(values)))
    labels = np.repeat(values, sizes)
    np.random.default_rng(0).shuffle(labels)
    return labels, draw(st.integers(1, 2 * len(labels))), draw(st.integers(0, 2**32))


def assert_exact_cover(parts, total):
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(total))
    assert all(part.dtype == np.int64 and np.all(np.diff(part) > 0) for part in parts)


@quick
@given(cases(), st.sampled_from([1e-320, 1e-3, 0.01, 0.5, 1e3, 1.7e308]), st.integers(0, 4))
def test_dirichlet_places_every_sample_once_and_no_client_below_min_size(case, alpha, least):
    labels, clients, seed = case
    if clients * max(1, least) > len(labels):
        with pytest.raises(ValueError, match=str(len(labels))):
            partition.dirichlet(labels, clients, alpha, seed=seed, min_size=least)
        parts = partition.dirichlet(labels, clients, alpha, seed=seed, allow_empty=True)
    else:
        parts = partition.dirichlet(labels, clients, alpha, seed=seed, min_size=least)
        assert min(map(len, parts)) >= max(1, least)
    assert len(parts) == clients
    assert_exact_cover(parts, len(labels))


@quick
@given(cases())
def test_extreme_and_iid_place_every_sample_once(case):
    labels, clients, seed = case
    for share in (partition.extreme, partition.iid):
        if clients > len(labels):
            with pytest.raises(ValueError, match=f"{clients} clients .* {len(labels)} samples"):
                share(labels, clients, seed=seed)
        parts = share(labels, clients, seed=seed, allow_empty=clients > len(labels))
        assert len(parts) == clients
        assert_exact_cover(parts, len(labels))
        if clients <= len(labels):
            assert min(map(len, parts)) >= 1


@quick
@given(cases(), st.integers(1, 8))
def test_labels_per_client_places_every_sample_once_with_k_labels_each(case, k):
    labels, clients, seed = case
    sizes = np.unique(labels, return_counts=True)[1]
    possible = k <= len(sizes) <= clients * k and np.minimum(sizes, clients).sum() >= clients * k
    if clients > len(labels) or not possible:
        with pytest.raises(ValueError, match=r"^data\."):
            partition.labels_per_client(labels, clients, k, seed=seed)
        return
    parts = partition.labels_per_client(labels, clients, k, seed=seed)
    assert_exact_cover(parts, len(labels))
    table = partition.counts(labels, parts)
    assert np.all((table > 0).sum(axis=1) == k)
    for column in table.T:  # shards of a class are equal to within one
        assert np.ptp(column[column > 0]) <= 1


@pytest.mark.parametrize(("clients", "k"), [(20, 3), (10, 1), (30, 1), (10, 10), (50, 2)])
def test_labels_per_client_is_equal_in_size_when_shards_come_out_even(clients, k):
    labels = np.repeat(np.arange(10), 600)
    parts = partition.labels_per_client(labels, clients, k, seed=3)
    assert {len(part) for part in parts} == {6000 // clients}


@pytest.mark.parametrize("clients", [1, 3, 5, 10, 20, 25, 40])
def test_extreme_gives_99_percent_of_a_class_to_its_owners(clients):
    labels = np.repeat(np.arange(10) * 7 - 3, 600)
    parts = partition.extreme(labels, clients, seed=5)
    table = partition.counts(labels, parts)
    owned = table >= 100  # 594 shared by at most four, against 6 spread over the others
    if clients == 1:
        assert table.tolist() == [[600] * 10]
        return
    assert np.all((table * owned).sum(axis=0) == 594)
    assert np.all(owned.sum(axis=1) >= 1)
    most, least = owned.sum(axis=1).max(), owned.sum(axis=1).min()
    assert (most, least) == (-(-10 // clients), max(1, 10 // clients))
    for column, holders in zip(table.T, owned.T, strict=True):
        assert holders.sum() in (max(1, clients // 10), -(-clients // 10))
        assert np.ptp(column[holders]) <= 1
    assert not np.array_equal(
        table, partition.counts(labels, partition.extreme(labels, clients, seed=6))
    )


def test_dirichlet_profiles_follow_alpha():
    labels = np.repeat(np.arange(10), 600)

    def largest_share(alpha):
        table = partition.counts(labels, partition.dirichlet(labels, 10, alpha, seed=1))
        return (table.max(axis=1) / table.sum(axis=1)).mean()

    assert largest_share(1000) < 0.12 < 0.3 < largest_share(0.5) < largest_share(0.05)


def test_dirichlet_shares_a_class_in_proportion_to_the_profiles():
    """Against plain arithmetic on the same stream, where alpha is large enough for it."""
    sizes, clients, alpha = np.array([1000, 500, 70]), 6, 2.0
    table = shares.dirichlet_counts(sizes, clients, alpha, np.random.default_rng(9))
    rng = np.random.default_rng(9)
    uniform = 1 - rng.random((clients, 3))
    gamma = rng.standard_gamma(alpha + 1, (clients, 3)) * uniform ** (1 / alpha)
    profiles = gamma / gamma.sum(axis=1, keepdims=True)
    expected = sizes * profiles / profiles.sum(axis=0)
    assert np.all(table.sum(axis=0) == sizes)
    assert np.abs(table - expected).max() < 1


@pytest.mark.parametrize("alpha", [0.05, 0.3, 3.0])
def test_profiles_drawn_in_logarithms_are_numpys_dirichlet(alpha):
    sizes, clients, draws = np.full(4, 10**6), 3, 1500
    rng = np.random.default_rng(4)
    ours = [shares.dirichlet_counts(sizes, clients, alpha, rng)[0] / 10**6 for _ in range(draws)]
    profiles = rng.dirichlet(np.full(4, alpha), (draws, clients)) + 1e-300
    theirs = profiles[:, 0] / profiles.sum(axis=1)
    for column in range(4):
        first, second = np.array(ours)[:, column], theirs[:, column].round(6)
        assert ks_2samp(first, second).pvalue > 1e-3


def test_dirichlet_with_100_clients_at_alpha_001():
    labels = np.repeat(np.arange(10), 60)
    parts = partition.dirichlet(labels, 100, 0.01, seed=0)
    assert_exact_cover(parts, 600)
    assert min(map(len, parts)) >= 2
    table = partition.counts(labels, parts)
    assert np.median(table.max(axis=1) / table.sum(axis=1)) > 0.95


def test_dirichlet_that_cannot_be_drawn_ends_and_says_what_it_moved(caplog):
    labels = np.repeat(np.arange(10), [582] + [2] * 9)  # nine classes too small for their clients
    with caplog.at_level(logging.WARNING):
        parts = partition.dirichlet(labels, 100, 0.01, seed=0)
    assert_exact_cover(parts, 600)
    assert min(map(len, parts)) == 2
    assert "data.min_size=2" in caplog.text and "moved" in caplog.text
    with_holes = partition.dirichlet(labels, 100, 0.01, seed=0, allow_empty=True)
    assert min(map(len, with_holes)) == 0
    assert_exact_cover(with_holes, 600)


def test_a_good_draw_is_not_redrawn_and_logs_nothing(caplog):
    labels = np.repeat(np.arange(10), 600)
    with caplog.at_level(logging.INFO):
        parts = partition.dirichlet(labels, 10, 0.5, seed=2)
    free = partition.dirichlet(labels, 10, 0.5, seed=2, allow_empty=True)
    assert not caplog.records
    assert all(np.array_equal(a, b) for a, b in zip(parts, free, strict=True))


def _case(name):
    labels = np.repeat(np.arange(40), 35)
    domains = np.repeat(np.arange(4), 350)
    return labels, domains, dict(name=name, clients=14, alpha=0.1, labels_per_client=4, seed=11)


def _digest(name):
    labels, domains, arguments = _case(name)
    parts = partition.split(labels, domains, **arguments)
    return hashlib.sha256(b"|".join(part.tobytes() for part in parts)).hexdigest()


def test_the_same_seed_gives_the_same_parts_in_a_fresh_process():
    code = "import test_partition as t; print([t._digest(n) for n in t.partition.PARTITIONS])"
    run = [sys.executable, "-c", code]
    fresh = subprocess.run(run, capture_output=True, text=True, check=True, cwd=HERE)
    assert fresh.stdout.strip() == str([_digest(name) for name in partition.PARTITIONS])


@pytest.mark.parametrize("name", partition.PARTITIONS)
def test_another_seed_gives_other_parts(name):
    labels, domains, arguments = _case(name)
    ours = partition.split(labels, domains, **arguments)
    other = partition.split(labels, domains, **{**arguments, "seed": 12})
    assert any(not np.array_equal(a, b) for a, b in zip(ours, other, strict=True))


@pytest.mark.parametrize("name", ["dirichlet", "extreme", "labels_per_client"])
def test_split_keeps_clients_within_contiguous_blocks_of_domains(name):
    labels, domains, arguments = _case(name)
    order = np.random.default_rng(0).permutation(len(labels))  # domains need not be sorted
    labels, domains = labels[order], domains[order]
    parts = partition.split(labels, domains, **arguments)
    assert_exact_cover(parts, len(labels))
    homes = partition.home_domains(parts, domains)
    assert homes.tolist() == [0] * 4 + [1] * 4 + [2] * 3 + [3] * 3
    assert all(len(set(domains[part])) == 1 for part in parts)


def test_domains_do_not_share_a_stream():
    labels, domains = np.tile(np.repeat(np.arange(5), 40), 2), np.repeat([0, 1], 200)
    parts = partition.split(labels, domains, name="dirichlet", clients=8, alpha=0.3, seed=0)
    first, second = partition.counts(labels, parts)[:4], partition.counts(labels, parts)[4:]
    assert not np.array_equal(first, second)


def test_iid_ignores_domains_and_works_with_fewer_clients_than_domains():
    labels, domains, _ = _case("iid")
    parts = partition.split(labels, domains, name="iid", clients=3, seed=0)
    assert_exact_cover(parts, len(labels))
    assert np.ptp([len(part) for part in parts]) <= 1
    assert len(set(domains[parts[0]])) == 4


def test_home_domain_is_that_of_most_samples_and_minus_one_without():
    parts = [np.array([0, 3, 4]), np.array([], np.int64), np.array([1, 2])]
    assert partition.home_domains(parts, np.array([0, 0, 0, 2, 2])).tolist() == [2, -1, 0]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"name": "shuffled"}, "data.partition='shuffled'.*dirichlet, extreme"),
        ({"clients": 3}, "data.clients=3 .* 4 domains"),
        ({"clients": 2000}, "data.clients: 500 clients .* 350 samples"),
        ({"clients": 800}, "data.min_size=2: 200 clients .* 400 samples, there are 350"),
        ({"alpha": 0.0}, "data.alpha=0.0"),
        ({"alpha": float("nan")}, "data.alpha=nan"),
        ({"alpha": float("inf")}, "data.alpha=inf"),
        ({"min_size": -1}, "data.min_size=-1"),
        ({"name": "labels_per_client", "labels_per_client": 0}, "data.labels_per_client=0"),
        ({"name": "labels_per_client", "labels_per_client": 11}, "data.labels_per_client=11"),
        ({"name": "labels_per_client", "labels_per_client": 1}, "4 clients .* 4 of 10 classes"),
        ({"name": "iid", "clients": 0}, "data.clients=0"),
    ],
)
def test_bad_arguments_are_one_line_that_names_the_key(change, key):
    labels, domains, arguments = _case("dirichlet")
    with pytest.raises(ValueError, match=key) as caught:
        partition.split(labels, domains, **{**arguments, **change})
    assert "\n" not in str(caught.value)


@quick
@given(
    st.integers(0, 500),
    st.lists(st.floats(0, 1e6), min_size=1, max_size=30).filter(lambda w: sum(w) > 1e-6),
)
def test_apportion_is_exact_and_within_one_of_the_quota(total, weights):
    weights = np.array(weights)
    given_out = shares.apportion(total, weights)
    assert given_out.sum() == total
    assert np.abs(given_out - total * weights / weights.sum()).max() < 1 + 1e-9


@quick
@given(cases(), st.integers(1, 30))
def test_balanced_subsets_are_balanced_and_nested(case, per_class):
    labels, _, _ = case
    sizes = np.unique(labels, return_counts=True)[1]
    small, large = (
        shares.balanced(labels, per_class * len(sizes)),
        shares.balanced(labels, 2 * per_class * len(sizes)),
    )
    assert np.all(np.unique(labels[small], return_counts=True)[1] == np.minimum(sizes, per_class))
    assert set(small) <= set(large)
    assert np.all(np.diff(small) > 0)
