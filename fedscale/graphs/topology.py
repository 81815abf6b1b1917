"""Communication graphs: undirected networkx graphs on the clients 0 … n−1 (appendix C.3)."""

from __future__ import annotations

import math
from collections.abc import Iterable

import networkx as nx
import numpy as np

TOPOLOGIES = ("ring", "grid", "erdos_renyi", "regular", "complete")
CONNECT_DRAWS = 100


def check(
    name: str, n: int, *, degree: float | None = None, probability: float | None = None
) -> None:
    """Raise a one-line ValueError if `build` could not make this graph; draws nothing.

    `degree` matters to regular and to erdos_renyi without a probability, `probability` to
    erdos_renyi alone; elsewhere both are ignored, so that one setting can sweep over topologies.
    """
    if name not in TOPOLOGIES:
        raise ValueError(f"graph.name={name!r} is unknown; allowed: {', '.join(TOPOLOGIES)}")
    if n < 1:
        raise ValueError(f"data.clients={n}: a graph needs at least 1 client")
    if name == "erdos_renyi" and probability is not None:
        if not 0 <= probability <= 1:
            raise ValueError(f"graph.probability={probability}: allowed are values from 0 to 1")
        return
    if name not in ("erdos_renyi", "regular"):
        return
    if n < 2:
        raise ValueError(f"data.clients={n}: graph.name={name} needs at least 2 clients")
    if name == "erdos_renyi":
        if degree is None or not 0 <= degree <= n - 1:
            raise ValueError(
                f"graph.degree={degree}: erdos_renyi on {n} clients takes an expected degree "
                f"from 0 to {n - 1}, or a graph.probability"
            )
        return
    whole = degree is not None and 1 <= degree <= n - 1 and degree == int(degree)
    if degree is None or not whole or n * degree % 2:
        kind = "an even number" if n % 2 else "a whole number"
        raise ValueError(
            f"graph.degree={degree}: regular on {n} clients takes {kind} from 1 to {n - 1}"
            + (", because degree × clients counts every edge twice" if n % 2 else "")
        )


def build(
    name: str,
    n: int,
    *,
    seed: int | np.random.Generator,
    degree: float | None = None,
    probability: float | None = None,
    connected: bool = False,
) -> nx.Graph:
    """Build one graph on the nodes 0 … n−1, without self-loops.

    ring: a cycle. grid: an r × n/r lattice, r the largest divisor of n up to √n. complete: every
    pair. erdos_renyi: each pair with `probability`, or with degree/(n−1). regular: uniform over
    simple graphs in which every node has `degree` neighbours.

    Args:
        seed: of the two random topologies; ring, grid and complete have no randomness (`permuted`
            shuffles who sits where).
        connected: redraw a random graph until it is connected, at most 100 times. Otherwise it may
            be disconnected; its mixing factor is then 1.

    Raises:
        ValueError: as `check`, or no connected graph was drawn.
    """
    check(name, n, degree=degree, probability=probability)
    rng = np.random.default_rng(seed)
    if name == "ring":
        return _graph(n, ((i, (i + 1) % n) for i in range(n)))
    if name == "grid":
        rows = max(r for r in range(1, math.isqrt(n) + 1) if n % r == 0)
        return nx.convert_node_labels_to_integers(nx.grid_2d_graph(rows, n // rows))
    if name == "complete":
        return nx.complete_graph(n)
    for _ in range(CONNECT_DRAWS):
        if name == "regular":
            graph = _regular(n, int(degree or 0), rng)
        else:
            p = (degree or 0) / (n - 1) if probability is None else probability
            graph = _graph(n, nx.gnp_random_graph(n, p, seed=rng).edges)
        if not connected or nx.is_connected(graph):
            return graph
    raise ValueError(
        f"graph.connected=True: none of {CONNECT_DRAWS} draws of {name} on {n} clients was "
        f"connected (graph.degree={degree}, graph.probability={probability}); allowed are denser"
    )


def permuted(graph: nx.Graph, seed: int | np.random.Generator) -> nx.Graph:
    """Shuffle uniformly which client sits on which node of the graph."""
    place = np.random.default_rng(seed).permutation(len(graph)).tolist()
    return _graph(len(graph), ((place[u], place[v]) for u, v in graph.edges))


def drop_links(graph: nx.Graph, probability: float, *, seed: int | np.random.Generator) -> nx.Graph:
    """Remove each edge independently with the given probability; every node stays.

    Raises:
        ValueError: a probability outside [0, 1].
    """
    if not 0 <= probability <= 1:
        raise ValueError(f"graph.link_drop={probability}: allowed are values from 0 to 1")
    # Sorted, so that the draw belongs to the edge and not to the order of its construction.
    edges = sorted(tuple(sorted(edge)) for edge in graph.edges)
    kept = np.random.default_rng(seed).random(len(edges)) >= probability
    return _graph(len(graph), (edge for edge, keep in zip(edges, kept, strict=True) if keep))


def induced(graph: nx.Graph, active: np.ndarray) -> nx.Graph:
    """Keep the edges between active clients ((n,) bool); the others stay as isolated nodes."""
    return _graph(len(graph), ((u, v) for u, v in graph.edges if active[u] and active[v]))


def _graph(n: int, edges: Iterable[tuple[int, int]]) -> nx.Graph:
    graph = nx.empty_graph(n)
    graph.add_edges_from(sorted((min(u, v), max(u, v)) for u, v in edges if u != v))
    return graph


def _regular(n: int, degree: int, rng: np.random.Generator) -> nx.Graph:
    # networkx pairs stubs until the graph is simple, which takes minutes for dense graphs
    # (95 s at degree 45 of 50); the complement of a uniform regular graph is one as well.
    if degree > (n - 1) // 2:
        return _graph(n, nx.complement(_regular(n, n - 1 - degree, rng)).edges)
    return _graph(n, nx.random_regular_graph(degree, n, seed=rng).edges)
