import math

import numpy as np
import ot
import pytest
import reference
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import cdist

from fedscale.merge.ot import OTMerge, merge_neighbourhoods, ot_merge, sample_starts

SEEDS = st.integers(0, 10**6)


def problem(N=12, n=3, d=5, seed=0, scale=1.0, batch=()):
    """A neighbourhood of clusters, and a start near it."""
    rng = np.random.default_rng(seed)
    centres = scale * rng.normal(size=(*batch, n, d))
    spread = scale * rng.choice([0.01, 0.3, 1.0]) * rng.normal(size=(*batch, N, d))
    omega = np.take(centres, rng.integers(n, size=N), axis=-2) + spread
    return torch.from_numpy(omega), torch.from_numpy(
        centres + scale * rng.normal(size=centres.shape)
    )


def relative(actual, expected):
    """Largest difference, relative to the largest entry expected."""
    actual, expected = (torch.as_tensor(np.asarray(t)) for t in (actual, expected))
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-300))


# ---------------------------------------------------------------- against the dense reference


@given(
    st.integers(1, 20),
    st.integers(1, 6),
    st.integers(1, 40),
    st.floats(-4, 4),
    st.floats(-6, 6),
    st.integers(1, 20),
    SEEDS,
)
@example(20, 4, 40, -4.0, 6.0, 20, 0)
@example(20, 4, 3, 4.0, 6.0, 20, 1)
@settings(deadline=None, max_examples=150)
def test_equals_the_dense_reference(N, n, d, log_epsilon, log_scale, steps, seed):
    # Scales up to 1e6: costs up to about 1e12 and beyond.
    omega, phi0 = problem(N, n, d, seed, 10**log_scale)
    options = {"epsilon": 10**log_epsilon, "steps": steps}
    phi, plan = reference.ot_merge(omega, phi0, **options)
    merged = ot_merge(omega, phi0, **options)
    assert relative(merged.phi, phi) < 1e-6
    assert relative(merged.plan, plan) < 1e-6
    assert relative(merged.mass, plan.sum(axis=0)) < 1e-6


@given(SEEDS, st.sampled_from([1e-3, 1.0, 30.0]), st.sampled_from([1e-9, 1e-3, 10.0]))
@settings(deadline=None, max_examples=30)
def test_sigma_and_lambda_enter_as_in_the_equations(seed, sigma2, lam):
    omega, phi0 = problem(seed=seed)
    options = {"epsilon": 0.3, "sigma2": sigma2, "lam": lam, "steps": 7}
    phi, plan = reference.ot_merge(omega, phi0, **options)
    merged = ot_merge(omega, phi0, objective=True, **options)
    assert relative(merged.phi, phi) < 1e-9
    options.pop("steps")
    expected = reference.objective(plan, phi, omega.numpy(), **options)
    assert float(merged.objective[-1]) == pytest.approx(expected, rel=1e-9, abs=1e-12)


# ---------------------------------------------------------------- descent and Theorem 1


@given(
    st.integers(1, 15),
    st.integers(1, 5),
    st.integers(1, 30),
    st.floats(-4, 4),
    st.floats(-7, 7),
    st.floats(-6, 2),
    SEEDS,
)
@settings(deadline=None, max_examples=100)
def test_the_objective_never_rises_and_theorem_1_holds(
    N, n, d, log_epsilon, log_scale, log_lambda, seed
):
    omega, phi0 = problem(N, n, d, seed, 10**log_scale)
    epsilon, lam, steps = 10**log_epsilon, 10**log_lambda, 30
    merged = ot_merge(omega, phi0, epsilon=epsilon, lam=lam, steps=steps, objective=True)
    J, delta = merged.objective.numpy(), merged.delta.numpy()
    assert J.shape == (2 * steps + 1,)
    rounding = 1e-12 * (np.abs(J[:-1]) + np.abs(J[1:]) + epsilon * math.log(math.e * n * N))
    assert (J[1:] <= J[:-1] + rounding).all()

    mu = min(epsilon, lam)
    # The step of its proof: J falls by at least mu/4 · delta² in every alternation.
    assert (mu / 4 * delta**2 <= J[:-2:2] - J[2::2] + 2 * rounding[1::2]).all()
    lowest = -epsilon * (math.log(n * N) + 1)
    assert lowest <= J[-1] + rounding[-1]
    assert delta.min() ** 2 <= 4 * (J[0] - lowest + rounding[0]) / (mu * steps)


def test_the_history_of_the_objective_starts_at_the_uniform_plan():
    omega, phi0 = problem()
    merged = ot_merge(omega, phi0, epsilon=0.5, steps=1, objective=True)
    uniform = np.full((12, 3), 1 / 36)
    plan = merged.plan.numpy()
    stages = [(uniform, phi0.numpy()), (plan, phi0.numpy()), (plan, merged.phi.numpy())]
    expected = [reference.objective(p, f, omega.numpy(), epsilon=0.5) for p, f in stages]
    assert np.allclose(merged.objective.numpy(), expected, rtol=1e-12)
    moved = np.linalg.norm(plan - uniform) + np.linalg.norm(merged.phi - phi0)
    assert float(merged.delta[0]) == pytest.approx(moved)
    assert ot_merge(omega, phi0).objective is None


# ---------------------------------------------------------------- symmetries and limits


@given(SEEDS, st.sampled_from([0.01, 0.5, 10.0]))
@settings(deadline=None, max_examples=30)
def test_order_of_the_neighbourhood_is_irrelevant_and_of_the_start_carries_over(seed, epsilon):
    # Started at prompts of the neighbourhood: two representatives without mass would meet at 0,
    # and from there only rounding decides which of them takes what.
    omega, _ = problem(seed=seed)
    phi0 = omega[:3].clone()
    rows, columns = torch.randperm(12), torch.randperm(3)
    plain = ot_merge(omega, phi0, epsilon=epsilon, steps=10)
    shuffled = ot_merge(omega[rows], phi0[columns], epsilon=epsilon, steps=10)
    assert relative(shuffled.phi, plain.phi[columns]) < 1e-8
    assert relative(shuffled.plan, plain.plan[rows][:, columns]) < 1e-8


@given(st.integers(1, 70), st.integers(1, 12), st.sampled_from([1e-4, 0.01, 1.0, 1e4]))
@settings(deadline=None, max_examples=30)
def test_identical_prompts_shrink_and_nothing_is_nan(N, n, epsilon):
    # The state before the first round: every client holds the same prompts.
    z = torch.linspace(-1, 2, 9, dtype=torch.float64)
    merged = ot_merge(z.expand(N, 9), z.expand(n, 9), epsilon=epsilon)
    mass = merged.mass.unsqueeze(-1)
    assert float(merged.mass.sum()) == pytest.approx(1, rel=1e-12)
    assert relative(merged.phi, z * mass / (mass + 1e-3)) < 1e-12
    assert merged.mass.tolist() == pytest.approx([1 / n] * n, rel=1e-9)


def test_balanced_clusters_shrink_by_0_990_at_the_defaults():
    rng = np.random.default_rng(0)
    prompts = torch.from_numpy(3 * rng.normal(size=(10, 20)))
    merged = ot_merge(prompts.repeat(6, 1), prompts)
    factor = (1 / 10) / (1 / 10 + 1e-3)
    assert factor == pytest.approx(0.990, abs=1e-3)
    assert relative(merged.phi, factor * prompts) < 1e-12
    assert merged.mass.tolist() == pytest.approx([0.1] * 10, rel=1e-12)


def test_a_representative_without_mass_goes_to_zero_and_says_so():
    # The prompts lie far from 0; near it, the representative at 0 would win some mass back.
    omega = torch.randn(8, 4, dtype=torch.float64) + 100
    phi0 = torch.stack([omega.mean(0), torch.full((4,), 1e4, dtype=torch.float64)])
    merged = ot_merge(omega, phi0)
    assert torch.equal(merged.phi[1], torch.zeros(4, dtype=torch.float64))
    assert merged.mass.tolist() == pytest.approx([1, 0])


def test_without_lambda_nothing_shrinks_and_an_empty_representative_is_still_finite():
    omega = torch.tensor([[3.0, 4.0], [3.0, 6.0]]).double()
    phi0 = torch.tensor([[3.0, 5.0], [1e4, 1e4]]).double()
    merged = ot_merge(omega, phi0, lam=0.0, steps=1, objective=True)
    assert merged.phi.tolist() == [[3.0, 5.0], [0.0, 0.0]]
    assert merged.mass.tolist() == [1.0, 0.0]
    assert merged.objective.isfinite().all()


@given(SEEDS)
@settings(deadline=None, max_examples=30)
def test_small_epsilon_and_lambda_give_lloyd_steps(seed):
    omega, phi0 = problem(30, 4, 3, seed)
    z, centres = omega.numpy(), phi0.numpy()
    for _ in range(5):
        nearest = cdist(z, centres).argmin(axis=1)
        assume(len(set(nearest)) == 4)  # two empty ones would both lie at 0: a tie
        centres = np.stack([z[nearest == i].mean(axis=0) for i in range(4)])
    merged = ot_merge(omega, phi0, epsilon=1e-9, lam=1e-12, steps=5)
    assert np.allclose(merged.phi.numpy(), centres, atol=1e-8)


@given(SEEDS, st.integers(1, 6))
@settings(deadline=None, max_examples=30)
def test_large_epsilon_gives_the_shrunken_mean(seed, n):
    omega, phi0 = problem(n=n, seed=seed)
    merged = ot_merge(omega, phi0, epsilon=1e12)
    expected = omega.mean(0) * (1 / n) / (1 / n + 1e-3)
    assert torch.allclose(merged.phi, expected.expand(n, -1), rtol=1e-8, atol=1e-10)


def test_with_one_neighbourhood_atom_each_it_is_pots_barycenter():
    # Sharp epsilon and balanced clusters: the free-support barycenter, shrunk by λ alone.
    rng = np.random.default_rng(1)
    base = 10 * rng.normal(size=(4, 6))
    clients = [rng.permutation(base + 0.1 * rng.normal(size=base.shape)) for _ in range(5)]
    uniform = np.full(4, 0.25)
    oracle = ot.lp.free_support_barycenter(
        clients, [uniform] * 5, clients[0], uniform, numItermax=100, stopThr=1e-13
    )
    omega = torch.from_numpy(np.concatenate(clients))
    merged = ot_merge(omega, torch.from_numpy(clients[0]), epsilon=1e-6, lam=1e-12)
    assert np.allclose(merged.phi.numpy(), oracle, atol=1e-8)
    cost = cdist(omega.numpy(), merged.phi.numpy(), "sqeuclidean") / 2
    exact = ot.emd2(np.full(20, 0.05), uniform, cost)
    assert float((merged.plan.numpy() * cost).sum()) == pytest.approx(exact, rel=1e-9)


# ---------------------------------------------------------------- numbers of any size


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("exponent", [-30, -12, 0, 12, 30])
@pytest.mark.parametrize("epsilon", [1e-4, 0.01, 1e4])
def test_costs_of_any_size_are_finite(dtype, exponent, epsilon):
    torch.manual_seed(0)
    scale = 10 ** (exponent / 2)
    omega = (scale * torch.randn(3, 60, 768)).to(dtype)
    merged = ot_merge(omega, omega[:, :10].clone(), epsilon=epsilon, objective=True)
    for tensor in (merged.phi, merged.plan, merged.mass, merged.delta, merged.objective):
        assert tensor.isfinite().all()
    assert merged.phi.dtype == merged.plan.dtype == merged.mass.dtype == dtype
    assert torch.allclose(merged.plan.sum(-1), torch.tensor(1 / 60, dtype=dtype), rtol=1e-5)
    assert torch.allclose(merged.mass.sum(-1), torch.ones(3, dtype=dtype), rtol=1e-5)


def test_all_sizes_in_one_problem():
    sizes = torch.tensor(10.0).double() ** torch.arange(-15, 16)
    omega = sizes.unsqueeze(-1) * torch.eye(31, 40, dtype=torch.float64)
    merged = ot_merge(omega, omega[::3].clone())
    assert merged.phi.isfinite().all()
    phi, _ = reference.ot_merge(omega, omega[::3])
    assert relative(merged.phi, phi) < 1e-6


@given(st.sampled_from([0.0, 1e3, 1e6]), st.integers(0, 1000))
@settings(deadline=None, max_examples=30)
def test_a_common_offset_costs_no_accuracy(offset, seed):
    # |z|² is up to 5e13 here and the distances that matter are about 1: expanded as
    # |z|² + |φ|² − 2zφ they would be off by 1e-2. Without λ the merge moves with the points.
    rng = np.random.default_rng(seed)
    omega = rng.normal(size=(20, 50))
    phi0 = omega[:4] + 0.1 * rng.normal(size=(4, 50))
    options = {"epsilon": 4.0, "lam": 1e-18, "steps": 5}
    still, _ = reference.ot_merge(omega, phi0, **options)
    moved = ot_merge(torch.from_numpy(omega + offset), torch.from_numpy(phi0 + offset), **options)
    assert np.allclose(moved.phi.numpy() - offset, still, atol=1e-7)


def test_distant_clusters_keep_their_inner_distances():
    # Costs of 1e12 between the clusters, 1 within: epsilon must still act within.
    rng = np.random.default_rng(0)
    inner = rng.normal(size=(8, 90))
    omega = np.concatenate([inner, inner + 1e6, inner - 1e6])
    phi0 = omega[[0, 1, 8, 9, 16, 17]]
    options = {"epsilon": 30.0, "lam": 1e-20, "steps": 8}
    merged = ot_merge(torch.from_numpy(omega), torch.from_numpy(phi0), **options)
    for cluster, offset in enumerate((0.0, 1e6, -1e6)):
        expected, _ = reference.ot_merge(inner, inner[:2], **options)
        actual = merged.phi.numpy()[2 * cluster : 2 * cluster + 2] - offset
        assert np.allclose(actual, expected, atol=1e-6)


def test_float32_input_is_computed_in_float64():
    omega, phi0 = problem(60, 10, 100, 3)
    single = ot_merge(omega.float(), phi0.float(), epsilon=1e-3)
    double = ot_merge(omega.float().double(), phi0.float().double(), epsilon=1e-3)
    assert torch.equal(single.phi, double.phi.float())
    assert torch.equal(single.delta, double.delta)
    half = ot_merge(omega.bfloat16(), phi0.bfloat16())
    assert half.phi.dtype == torch.bfloat16


# ---------------------------------------------------------------- batches, masks, schedules


@given(SEEDS, st.integers(1, 4))
@settings(deadline=None, max_examples=20)
def test_leading_axes_are_separate_problems(seed, b):
    omega, phi0 = problem(seed=seed, batch=(2, b))
    merged = ot_merge(omega, phi0, epsilon=0.2, steps=9, objective=True)
    assert merged.plan.shape == (2, b, 12, 3)
    assert merged.delta.shape == (2, b, 9)
    assert merged.objective.shape == (2, b, 19)
    for i in range(2):
        for j in range(b):
            alone = ot_merge(omega[i, j], phi0[i, j], epsilon=0.2, steps=9, objective=True)
            for name in ("phi", "plan", "mass", "delta", "objective"):
                actual, expected = getattr(merged, name)[i, j], getattr(alone, name)
                assert torch.allclose(actual, expected, rtol=1e-8, atol=1e-10)


@given(
    SEEDS, st.integers(0, 9), st.sampled_from([math.nan, math.inf, 1e30, 0.0]), st.integers(1, 60)
)
@settings(deadline=None, max_examples=50)
def test_padding_changes_nothing_whatever_it_holds(seed, padding, junk, d):
    omega, phi0 = problem(d=d, seed=seed)
    plain = ot_merge(omega, phi0, epsilon=0.1, steps=10, objective=True)
    places = torch.randperm(12 + padding)[:12].sort().values
    padded = torch.full((12 + padding, d), junk, dtype=torch.float64)
    padded[places] = omega
    mask = torch.zeros(12 + padding, dtype=torch.bool)
    mask[places] = True
    merged = ot_merge(padded, phi0, mask=mask, epsilon=0.1, steps=10, objective=True)
    assert relative(merged.phi, plain.phi) < 1e-9
    assert relative(merged.plan[mask], plain.plan) < 1e-9
    assert (merged.plan[~mask] == 0).all()
    assert relative(merged.mass, plain.mass) < 1e-9
    assert torch.allclose(merged.objective, plain.objective, rtol=1e-9)
    assert torch.allclose(merged.delta, plain.delta, rtol=1e-6, atol=1e-9)


def test_tolerance_stops_each_element_by_itself():
    torch.manual_seed(2)
    omega = torch.randn(5, 30, 8, dtype=torch.float64)
    phi0 = omega[:, :4].clone()
    omega[0] = omega[0, :1]  # settled after a few steps
    options = {"epsilon": 0.5, "steps": 60, "objective": True}
    tolerance = 0.05
    full = ot_merge(omega, phi0, **options)
    stopped = ot_merge(omega, phi0, tolerance=tolerance, **options)
    last = [int((row < tolerance).nonzero()[0]) for row in full.delta]
    assert len(set(last)) > 1, "the example must stop at different steps"
    for b, s in enumerate(last):
        shorter = ot_merge(omega[b : b + 1], phi0[b : b + 1], epsilon=0.5, steps=s + 1)
        assert torch.allclose(stopped.phi[b], shorter.phi[0], rtol=1e-10, atol=1e-12)
        assert torch.equal(stopped.delta[b, : s + 1], full.delta[b, : s + 1])
        assert (stopped.delta[b, s + 1 :] == 0).all()
        assert (stopped.objective[b, 2 * s + 2 :] == stopped.objective[b, 2 * s + 2]).all()
        alone = ot_merge(omega[b], phi0[b], tolerance=tolerance, **options)
        assert torch.allclose(stopped.phi[b], alone.phi, rtol=1e-10, atol=1e-12)


def test_anneal_is_geometric_and_ends_at_epsilon():
    omega, phi0 = problem(seed=4)
    phi = phi0
    for epsilon in np.geomspace(8.0, 0.05, 6):
        phi = ot_merge(omega, phi, epsilon=float(epsilon), steps=1).phi
    options = {"epsilon": 0.05, "epsilon_init": 8.0, "schedule": "anneal"}
    merged = ot_merge(omega, phi0, steps=6, **options)
    assert relative(merged.phi, phi) < 1e-9
    one = ot_merge(omega, phi0, steps=1, **options)
    assert relative(one.phi, ot_merge(omega, phi0, epsilon=0.05, steps=1).phi) < 1e-12


def test_annealing_leaves_a_local_minimum_that_traps_a_sharp_epsilon():
    # Two representatives start in the first of three clusters, one between the other two.
    omega = torch.tensor([99.9, 100, 100.1, 109.9, 110, 110.1, 119.9, 120, 120.1]).double()
    phi0 = torch.tensor([99.9, 100.1, 115.0]).double()
    options = {"lam": 1e-9, "steps": 100, "objective": True}
    fixed = ot_merge(omega[:, None], phi0[:, None], **options)
    annealed = ot_merge(
        omega[:, None], phi0[:, None], schedule="anneal", epsilon_init=200.0, **options
    )
    assert fixed.phi.flatten().tolist() == pytest.approx([100, 100, 115], abs=0.1)
    assert annealed.phi.flatten().tolist() == pytest.approx([100, 110, 120], abs=0.1)
    assert annealed.objective[-1] < fixed.objective[-1]


def test_nothing_is_left_on_the_autograd_graph_and_inputs_are_untouched():
    omega, phi0 = problem()
    omega.requires_grad_()
    before = omega.detach().clone(), phi0.clone()
    merged = ot_merge(omega, phi0)
    assert isinstance(merged, OTMerge)
    assert not merged.phi.requires_grad
    assert torch.equal(omega, before[0])
    assert torch.equal(phi0, before[1])


# ---------------------------------------------------------------- refusals

Z, F = torch.zeros(4, 3), torch.zeros(2, 3)
NAN = torch.tensor([[0.0, 0.0, 0.0], [0.0, math.nan, 0.0]])


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((NAN, F), {}, r"omega: nan at \(1, 1\)"),
        ((Z, NAN), {}, r"phi0: nan at \(1, 1\)"),
        ((Z / 0 + math.inf, F), {}, r"omega: nan at"),
        ((torch.full((4, 3), -math.inf), F), {}, r"omega: -inf at \(0, 0\)"),
        ((Z, F.double()), {}, r"omega torch\.float32, phi0 torch\.float64: allowed is one"),
        ((Z.long(), F.long()), {}, "allowed is one floating dtype"),
        ((Z, F.to("meta")), {}, "omega, phi0, mask are on cpu, meta: allowed is one"),
        ((Z, torch.zeros(2, 4)), {}, r"omega \(4, 3\), phi0 \(2, 4\)"),
        ((Z, torch.zeros(1, 2, 3)), {}, r"phi0 \(1, 2, 3\)"),
        ((torch.zeros(3), F), {}, r"omega \(3,\)"),
        ((torch.zeros(0, 3), F), {}, "needs a prompt"),
        ((Z, torch.zeros(0, 3)), {}, "needs a prompt"),
        ((Z, F), {"mask": torch.zeros(4, dtype=torch.bool)}, "needs a prompt"),
        ((Z, F), {"mask": torch.ones(3, dtype=torch.bool)}, r"mask \(3,\)"),
        ((Z, F), {"mask": torch.ones(4)}, r"torch\.float32: allowed are"),
        ((Z.double() + 1e160, F.double()), {}, "values up to 1e\\+160 are too large"),
        ((Z + 1, F), {"epsilon": 1e-305}, "1e300 x epsilon"),
        ((Z, F), {"epsilon": 0.0}, r"epsilon=0\.0: allowed"),
        ((Z, F), {"epsilon": math.nan}, "epsilon=nan"),
        ((Z, F), {"lam": -1e-3}, r"lam=-0\.001"),
        ((Z, F), {"sigma2": -1.0}, r"sigma2=-1\.0"),
        ((Z, F), {"sigma2": math.inf}, "sigma2=inf"),
        ((Z, F), {"steps": 0}, "steps=0"),
        ((Z, F), {"steps": 2.5}, r"steps=2\.5"),
        ((Z, F), {"schedule": "cosine"}, "schedule='cosine' is unknown; allowed: fixed, anneal"),
        ((Z, F), {"epsilon_init": 0.0}, "epsilon_init"),
        ((Z, F), {"tolerance": -1.0}, "tolerance"),
        ((Z, F), {"tolerance": 0.1, "schedule": "anneal"}, "with schedule='anneal' allowed is 0"),
    ],
)
def test_bad_input_is_named_in_one_line(arguments, options, message):
    with pytest.raises(ValueError, match=message) as error:
        ot_merge(*arguments, **options)
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------- neighbourhoods


def neighbourhoods(M=7, n=3, d=6, seed=0, dtype=torch.float64):
    rng = np.random.default_rng(seed)
    support = np.triu(rng.random((M, M)) < 0.4, 1)
    support = support | support.T | np.eye(M, dtype=bool)
    support[2] = support[:, 2] = False
    support[2, 2] = True
    updated, previous = torch.from_numpy(rng.normal(size=(2, M, n, d))).to(dtype)
    return support, updated, previous


@given(SEEDS, st.integers(1, 5), st.sampled_from([4, 10, 10**6]))
@settings(deadline=None, max_examples=30)
def test_ragged_neighbourhoods_equal_one_merge_per_client(seed, n, chunk):
    support, updated, previous = neighbourhoods(n=n, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedscale.merge.ot.CHUNK_ELEMENTS", chunk * updated[0].numel())
        phi, mass = merge_neighbourhoods(support, updated, previous, np.arange(7), epsilon=0.2)
    for u in range(7):
        if support[u].sum() == 1:
            assert torch.equal(phi[u], updated[u])
            assert torch.allclose(mass[u], torch.full((n,), 1 / n, dtype=torch.float64))
            continue
        alone = ot_merge(
            updated[torch.from_numpy(support[u])].flatten(0, 1), previous[u], epsilon=0.2
        )
        assert relative(phi[u], alone.phi) < 1e-7
        assert relative(mass[u], alone.mass) < 1e-7


def test_a_block_of_clients_gets_its_rows_of_the_whole():
    support, updated, previous = neighbourhoods(dtype=torch.float32)
    whole, _ = merge_neighbourhoods(support, updated, previous, np.arange(7))
    rows = np.array([5, 2, 1])
    block, mass = merge_neighbourhoods(support[rows], updated, previous[rows], rows)
    assert block.dtype == mass.dtype == torch.float32
    assert torch.allclose(block, whole[rows], atol=1e-6)
    assert torch.equal(block[1], updated[2])
    empty, _ = merge_neighbourhoods(support[:0], updated, previous[:0], rows[:0])
    assert empty.shape == (0, 3, 6)


def test_the_result_is_a_copy():
    support, updated, previous = neighbourhoods()
    before = updated.clone()
    phi, _ = merge_neighbourhoods(support, updated, previous, np.arange(7))
    phi.zero_()
    assert torch.equal(updated, before)


def test_a_diverged_client_is_named_unless_nobody_meets_it():
    support, updated, previous = neighbourhoods()
    updated[2] = math.nan
    phi, _ = merge_neighbourhoods(support, updated, previous, np.arange(7))
    assert phi[[0, 1, 3, 4, 5, 6]].isfinite().all()
    assert phi[2].isnan().all()
    met = int(np.flatnonzero(support.sum(axis=1) > 1)[0])
    updated[met] = math.inf
    with pytest.raises(ValueError, match=f"updated: the prompts of client {met} are not finite"):
        merge_neighbourhoods(support, updated, previous, np.arange(7))


def test_neighbourhood_shapes_are_checked():
    support, updated, previous = neighbourhoods()
    for arguments in (
        (support[:3], updated, previous, np.arange(7)),
        (support, updated[0], previous, np.arange(7)),
        (support, updated, previous[:, :2], np.arange(7)),
        (support, updated, previous, np.arange(6)),
    ):
        with pytest.raises(ValueError, match=r"allowed are \(C, M\), \(M, n, d\)"):
            merge_neighbourhoods(*arguments)
    with pytest.raises(ValueError, match="client 2 is not in its own neighbourhood"):
        merge_neighbourhoods(support, updated, previous, np.array([0, 1, 2, 3, 4, 5, 6])[[2] * 7])


def test_sample_starts_draws_distinct_prompts_of_the_neighbourhood():
    support, updated, _ = neighbourhoods(n=4)
    starts = sample_starts(support, updated, np.arange(7), seed=3, round=5)
    assert starts.shape == (7, 4, 6)
    for u in range(7):
        pool = {tuple(p) for p in updated[torch.from_numpy(support[u])].flatten(0, 1).tolist()}
        drawn = {tuple(p) for p in starts[u].tolist()}
        assert len(drawn) == 4
        assert drawn <= pool
    rows = np.array([4, 1])
    block = sample_starts(support[rows], updated, rows, seed=3, round=5)
    assert torch.equal(block, starts[rows])
    for other in ({"seed": 4, "round": 5}, {"seed": 3, "round": 6}):
        assert not torch.equal(sample_starts(support, updated, np.arange(7), **other), starts)
