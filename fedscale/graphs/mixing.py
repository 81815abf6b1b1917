"""Mixing matrices: symmetric, doubly stochastic weights on a communication graph."""

from __future__ import annotations

import networkx as nx
import numpy as np


def metropolis(graph: nx.Graph, lazy: bool = False) -> np.ndarray:
    """Metropolis weights: W_uv = 1 / (1 + max(deg u, deg v)) on edges, the rest on the diagonal.

    Symmetric and doubly stochastic on every undirected graph, isolated nodes included (their
    W_uu is 1). Uniform weights over closed neighbourhoods are so on regular graphs only.

    Args:
        graph: nodes 0 … M−1; self-loops are ignored.
        lazy: return (I + W) / 2, whose eigenvalues are never negative.

    Returns:
        (M, M) float64.

    Raises:
        ValueError: a directed graph, or nodes that are not 0 … M−1.
    """
    if graph.is_directed() or set(graph) != set(range(len(graph))):
        raise ValueError(f"graph={graph}: allowed are undirected graphs on the nodes 0 … M-1")
    linked = nx.to_numpy_array(graph, nodelist=range(len(graph)), weight=None) > 0
    np.fill_diagonal(linked, False)
    degree = linked.sum(axis=1)
    weights = np.where(linked, 1.0 / (1.0 + np.maximum.outer(degree, degree)), 0.0)
    np.fill_diagonal(weights, 1.0 - weights.sum(axis=1))
    return (np.eye(len(graph)) + weights) / 2 if lazy else weights


def mixing_factor(W: np.ndarray) -> float:
    """ρ = ‖W − 11ᵀ/M‖₂: how much of the clients' disagreement one mixing step can leave.

    0 on the complete graph, 1 whenever the graph is disconnected, so also when a client is idle.

    Args:
        W: (M, M), rows and columns summing to 1.
    """
    away = W - 1.0 / len(W)
    if np.array_equal(W, W.T):
        return float(np.abs(np.linalg.eigvalsh(away)).max())
    return float(np.linalg.norm(away, 2))
