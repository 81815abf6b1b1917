"""Dense float64 references, written for clarity: what the fast code must agree with."""

import itertools
import math

import networkx as nx
import numpy as np


def ot_merge(omega, phi0, epsilon=0.01, lam=1e-3, sigma2=1.0, steps=50):
    """Eq. (6), (8), (9) for one neighbourhood: omega (N, d), phi0 (n, d) → phi, plan."""
    z, phi = np.asarray(omega, dtype=np.float64), np.asarray(phi0, dtype=np.float64)
    plan = np.empty((len(z), len(phi)))
    for _ in range(steps):
        for a in range(len(z)):
            cost = np.square(z[a] - phi).sum(axis=1) / (2 * sigma2)
            soft = np.exp(-(cost - cost.min()) / epsilon)
            plan[a] = soft / soft.sum() / len(z)
        phi = plan.T @ z / (plan.sum(axis=0) + lam)[:, None]
    return phi, plan


def objective(plan, phi, omega, epsilon=0.01, lam=1e-3, sigma2=1.0):
    """Eq. (7) for one neighbourhood."""
    cost = np.square(omega[:, None] - phi[None]).sum(axis=2) / (2 * sigma2)
    logs = np.log(plan, out=np.zeros_like(plan), where=plan > 0)
    ridge = lam / (2 * sigma2) * np.square(phi).sum()
    return (plan * cost).sum() + epsilon * (plan * (logs - 1)).sum() + ridge


def metropolis(graph: nx.Graph) -> np.ndarray:
    """Metropolis weights, entry by entry."""
    m = len(graph)
    weights = np.zeros((m, m))
    for u in range(m):
        for v in graph.neighbors(u):
            weights[u, v] = 1 / (1 + max(graph.degree(u), graph.degree(v)))
        weights[u, u] = 1 - math.fsum(weights[u])
    return weights


def consensus_error(prompts) -> float:
    """Eq. (2)–(3) with n atoms by trying every combination of permutations: tiny cases only."""
    clients = np.asarray(prompts, dtype=np.float64)
    m, n, _ = clients.shape
    orders = [list(p) for p in itertools.permutations(range(n))]
    best = math.inf
    for rest in itertools.product(orders, repeat=m - 1):
        matched = np.stack([clients[0], *(clients[u + 1][o] for u, o in enumerate(rest))])
        best = min(best, np.square(matched - matched.mean(axis=0)).sum(axis=2).mean())
    return best
