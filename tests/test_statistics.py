import functools
import math
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedscale.data import catalogue, partition
from fedscale.local import statistics


@functools.cache
def pooled_images(size=6):
    """Four domains' training images (N, size²) float32, labels and domains."""
    train = catalogue.load("offline", 200, 50).train
    grey = [torch.from_numpy(images).float().mean(-1, keepdim=True) for images in train.images]
    pooled = [torch.nn.functional.adaptive_avg_pool2d(g.movedim(3, 1), size) for g in grey]
    return torch.cat(pooled).flatten(1) / 255, train.labels, train.domains


partitions = st.fixed_dictionaries(
    {
        "name": st.sampled_from(partition.PARTITIONS),
        "clients": st.integers(4, 24),
        "alpha": st.sampled_from([0.01, 0.1, 1.0, 10.0]),
        "labels_per_client": st.just(10),
        "seed": st.integers(0, 999),
        "allow_empty": st.booleans(),
    }
)


def shares(keys):
    """The clients' rows under a partition of the images, in an order that depends on the seed."""
    parts = partition.split(*pooled_images()[1:], **keys)
    order = np.random.default_rng(keys["seed"]).permutation(len(parts))
    return [torch.from_numpy(parts[client]) for client in order]


@settings(deadline=None, max_examples=40)
@given(
    n=st.integers(0, 60),
    d=st.integers(1, 9),
    k=st.integers(1, 5),
    parts=st.integers(1, 7),
    seed=st.integers(0, 999),
)
def test_sums_over_parts_are_the_sums_over_all(n, d, k, parts, seed):
    rng = np.random.default_rng(seed)
    h = torch.from_numpy(rng.normal(size=(n, d)).astype(np.float32))
    y = torch.from_numpy(rng.integers(0, k, n))
    R, C = statistics.sufficient_statistics(h, y, k)
    assert R.dtype == C.dtype == torch.float64
    order = torch.from_numpy(rng.permutation(n))
    cuts = sorted(rng.integers(0, n + 1, parts - 1).tolist())
    pieces = [
        statistics.sufficient_statistics(h[rows], y[rows], k) for rows in order.tensor_split(cuts)
    ]
    torch.testing.assert_close(sum(r for r, _ in pieces), R, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sum(c for _, c in pieces), C, rtol=1e-12, atol=1e-12)
    x, one = h.double().numpy(), np.eye(k)[y.numpy()]
    np.testing.assert_allclose(R.numpy(), x.T @ x, atol=1e-12)
    np.testing.assert_allclose(C.numpy(), x.T @ one, atol=1e-12)


@settings(deadline=None, max_examples=40)
@given(keys=partitions, chunk=st.integers(1, 400))
def test_clients_sums_are_the_pooled_ones_for_every_partition(keys, chunk):
    h, labels, _ = pooled_images()
    y = torch.from_numpy(labels)
    rows = shares(keys)
    stream = torch.cat(rows).split(chunk)
    found = statistics.client_statistics(
        ((h[part], y[part]) for part in stream), [len(r) for r in rows], 36, 40
    )
    R, C = statistics.sufficient_statistics(h, y, 40)
    assert found.gram.shape == (keys["clients"], 36 * 37 // 2)
    pooled = statistics.unpack_symmetric(found.gram.sum(0))
    torch.testing.assert_close(pooled, R, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.sums.sum(0), C, rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(found.counts, partition.counts(labels, [r.numpy() for r in rows]))
    last = statistics.sufficient_statistics(h[rows[-1]], y[rows[-1]], 40)
    own = statistics.unpack_symmetric(found.gram[-1])
    torch.testing.assert_close(own, last[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.sums[-1], last[1], rtol=1e-12, atol=1e-12)


def test_one_chunk_is_held_at_a_time():
    alive = []

    def chunks():
        for _ in range(6):
            assert sum(reference() is not None for reference in alive) <= 1
            h = torch.ones(5, 3)
            alive.append(weakref.ref(h))
            yield h, torch.zeros(5, dtype=torch.int64)

    statistics.client_statistics(chunks(), [7, 0, 23], 3, 1)
    assert len(alive) == 6


@pytest.mark.parametrize("d", [1, 2, 7, 30])
def test_packing_keeps_the_matrix_in_half_the_numbers(d):
    x = torch.randn(3, d, d, dtype=torch.float64)
    x = x + x.mT
    packed = statistics.pack_symmetric(x)
    assert packed.shape == (3, d * (d + 1) // 2) == (3, statistics.packed_size(d))
    assert torch.equal(statistics.unpack_symmetric(packed), x)


def test_a_mean_of_packed_matrices_is_the_packed_mean():
    weights = torch.tensor([[0.5, 0.5, 0.0], [0.25, 0.5, 0.25]], dtype=torch.float64)
    x = torch.randn(3, 4, 4, dtype=torch.float64)
    x = x + x.mT
    mixed = statistics.unpack_symmetric(weights @ statistics.pack_symmetric(x))
    torch.testing.assert_close(mixed, torch.einsum("uv,vij->uij", weights, x))


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1.0, 1e20, 1e30])
def test_any_float32_scale_is_exact_to_rounding(scale):
    h, y = torch.randn(20, 4), torch.randint(0, 3, (20,))
    large = h * scale
    R, C = statistics.sufficient_statistics(large, y, 3)
    ratio = float(torch.tensor(scale)) if scale != 1 else 1.0
    one = statistics.sufficient_statistics(large.double() / ratio, y, 3)
    torch.testing.assert_close(R / ratio**2, one[0], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(C / ratio, one[1], rtol=1e-12, atol=1e-14)
    unit = statistics.normalise(large)
    torch.testing.assert_close(unit.norm(dim=1), torch.ones(20))
    torch.testing.assert_close(unit, torch.nn.functional.normalize(h), rtol=1e-5, atol=1e-6)


def test_normalise_keeps_zeros():
    assert torch.equal(statistics.normalise(torch.zeros(2, 3)), torch.zeros(2, 3))


def test_absent_classes_one_sample_and_empty_clients():
    h, y = torch.tensor([[1.0, 2.0]]), torch.tensor([6])
    R, C = statistics.sufficient_statistics(h, y, 9)
    assert R.tolist() == [[1, 2], [2, 4]]
    assert C[:, 6].tolist() == [1, 2] and C.count_nonzero() == 2
    found = statistics.client_statistics([(h, y)], [0, 1, 0], 2, 9)
    assert found.gram.tolist() == [[0, 0, 0], [1, 2, 4], [0, 0, 0]]
    assert found.counts.sum(1).tolist() == [0, 1, 0]
    nobody = statistics.client_statistics([], [0, 0], 2, 9)
    assert not nobody.gram.any() and nobody.sums.shape == (2, 2, 9)


H, Y = torch.ones(3, 2), torch.tensor([0, 1, 5])


@pytest.mark.parametrize(
    ("h", "y", "k", "message"),
    [
        (H, Y, 3, "labels 0 to 5: allowed are 0 to 2"),
        (H, -Y, 6, "labels -5 to 0: allowed are 0 to 5"),
        (H, Y.float(), 6, "labels torch.float32: allowed are integers"),
        (H, Y > 0, 6, "labels torch.bool: allowed are integers"),
        (H, Y[:2], 6, "allowed are .N, d. and .N,."),
        (H[0], Y[:2], 6, "allowed are .N, d. and .N,."),
        (H[:, :0], Y, 6, "allowed are .N, d. and .N,."),
        (H.long(), Y, 6, "features torch.int64: allowed are floating"),
        (H, Y, 0, "num_classes=0: allowed"),
        (torch.tensor([[1.0], [math.inf]]), Y[:2], 6, r"features\[1\]: allowed are finite"),
        (torch.tensor([[math.nan], [1.0]]), Y[:2], 6, r"features\[0\]: allowed are finite"),
        (H.double() * 1e200, Y, 6, "features=1e.200: allowed are up to"),
    ],
)
def test_bad_samples_are_one_line(h, y, k, message):
    with pytest.raises(ValueError, match=message) as caught:
        statistics.sufficient_statistics(h, y, k)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("sizes", "width", "message"),
    [
        ([2], 2, "more than 2 samples"),
        ([2, 2], 2, "lack 1 of 4 samples"),
        ([], 2, "allowed are one or more"),
        ([4, -1], 2, "numbers from 0"),
        ([3], 5, "allowed are .n, 5."),
    ],
)
def test_a_stream_that_does_not_fit_is_refused(sizes, width, message):
    with pytest.raises(ValueError, match=message):
        statistics.client_statistics([(H, Y)], sizes, width, 6)


@pytest.mark.parametrize("shape", [(5,), (0,), ()])
def test_a_length_that_no_matrix_has_is_refused(shape):
    with pytest.raises(ValueError, match="1, 3, 6, 10"):
        statistics.unpack_symmetric(torch.zeros(shape))


@pytest.mark.parametrize("shape", [(2, 3), (3,)])
def test_only_square_matrices_are_packed(shape):
    with pytest.raises(ValueError, match="allowed are"):
        statistics.pack_symmetric(torch.zeros(shape))
