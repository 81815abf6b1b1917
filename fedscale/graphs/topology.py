"""Communication graphs: undirected networkx graphs on the clients 0 … n−1 (appendix C.3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import pairwise

import networkx as nx
import numpy as np

TOPOLOGIES = (
    "ring",
    "grid",
    "erdos_renyi",
    "regular",
    "complete",
    "barabasi_albert",
    "random_geometric",
    "watts_strogatz",
)
POLICIES = ("allow", "bridge", "resample")
"""What `connect` does about disconnected graphs."""

ATTACHMENTS = 1
"""Of barabasi_albert."""
RADIUS = 0.2
"""Of random_geometric, in a unit square."""
NEIGHBOURS, REWIRING = 3, 0.2
"""Of watts_strogatz."""
CONNECT_DRAWS = 100


def check(
    name: str,
    n: int,
    *,
    degree: float | None = None,
    probability: float | None = None,
    attachments: int = ATTACHMENTS,
    radius: float = RADIUS,
    neighbours: int = NEIGHBOURS,
    rewiring: float = REWIRING,
) -> None:
    """Raise a one-line ValueError if `build` could not make this graph; draws nothing.

    `degree` matters to regular and to erdos_renyi without a probability, `probability` to
    erdos_renyi alone, the others to one random topology each; elsewhere they are ignored, so that
    one setting can sweep over topologies.
    """
    if name not in TOPOLOGIES:
        raise ValueError(f"graph.name={name!r} is unknown; allowed: {', '.join(TOPOLOGIES)}")
    if n < 1:
        raise ValueError(f"data.clients={n}: a graph needs at least 1 client")
    if name == "erdos_renyi" and probability is not None:
        if not 0 <= probability <= 1:
            raise ValueError(f"graph.probability={probability}: allowed are values from 0 to 1")
        return
    if name == "watts_strogatz":
        _check_small_world(n, neighbours, rewiring)
    if name == "random_geometric" and not 0 <= radius < math.inf:
        raise ValueError(f"graph.radius={radius}: allowed are finite numbers from 0")
    if name == "barabasi_albert" and not (
        attachments == 1 or (_whole(attachments) and 1 <= attachments < n)
    ):
        raise ValueError(
            f"graph.attachments={attachments}: barabasi_albert on {n} clients takes a whole number "
            f"from 1 to {max(1, n - 1)}"
        )
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
    attachments: int = ATTACHMENTS,
    radius: float = RADIUS,
    neighbours: int = NEIGHBOURS,
    rewiring: float = REWIRING,
) -> nx.Graph:
    """Build one graph on the nodes 0 … n−1, without self-loops.

    ring: a cycle. grid: an r × n/r lattice, r the largest divisor of n up to √n. complete: every
    pair. erdos_renyi: each pair with `probability`, or with degree/(n−1). regular: uniform over
    simple graphs in which every node has `degree` neighbours. barabasi_albert: nodes join one by
    one with `attachments` edges each, preferably to nodes of high degree (1: a tree).
    random_geometric: nodes in a unit square, linked up to a distance of `radius`. watts_strogatz:
    a cycle with `neighbours` per node, edges rewired with probability `rewiring`, see
    `small_world`.

    Args:
        seed: of the random topologies; ring, grid and complete have no randomness (`permuted`
            shuffles who sits where).
        connected: redraw a random graph until it is connected, at most 100 times. Otherwise it may
            be disconnected; its mixing factor is then 1 (`connect` has another way).

    Raises:
        ValueError: as `check`, or no connected graph was drawn.
    """
    check(
        name,
        n,
        degree=degree,
        probability=probability,
        attachments=attachments,
        radius=radius,
        neighbours=neighbours,
        rewiring=rewiring,
    )
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
        elif name == "barabasi_albert":
            grown = nx.barabasi_albert_graph(n, attachments, seed=rng).edges if n > 1 else ()
            graph = _graph(n, grown)
        elif name == "random_geometric":
            graph = _graph(n, nx.random_geometric_graph(n, radius, seed=rng).edges)
        elif name == "watts_strogatz":
            graph = small_world(n, neighbours, rewiring, seed=rng)
        else:
            p = (degree or 0) / (n - 1) if probability is None else probability
            graph = _graph(n, nx.gnp_random_graph(n, p, seed=rng).edges)
        if not connected or nx.is_connected(graph):
            return graph
    raise ValueError(
        f"graph.connect=resample: none of {CONNECT_DRAWS} draws of {name} on {n} clients was "
        f"connected (graph.degree={degree}, graph.probability={probability}); allowed are denser "
        "graphs, or graph.connect=bridge"
    )


def small_world(
    n: int, neighbours: int, rewiring: float, *, seed: int | np.random.Generator
) -> nx.Graph:
    """Draw a Watts–Strogatz graph with any number of neighbours k, odd ones too.

    Every node is linked to the ⌊k/2⌋ next ones on a cycle. An odd k adds a matching, where
    networkx takes k − 1 without a word: with s = ⌊k/2⌋ + 1, node i to node i + s inside blocks of
    2s nodes in a row; the last block takes the rest, m < 4s nodes, and links i to i + ⌊m/2⌋. So
    every node has k links, only one node has k − 1 where n and k are both odd. Then every link u–v
    is replaced with probability `rewiring` by u–w, w uniform over the nodes that u has no link to.

    Raises:
        ValueError: k that is no whole number below n, a probability outside [0, 1].
    """
    _check_small_world(n, neighbours, rewiring)
    rng = np.random.default_rng(seed)
    near = [(i, (i + step) % n) for step in range(1, neighbours // 2 + 1) for i in range(n)]
    if neighbours % 2:
        block = neighbours + 1
        for first in range(0, n - block + 1, block):
            half = (block if first + 2 * block <= n else n - first) // 2
            near += [(first + i, first + i + half) for i in range(half)]
    graph = _graph(n, near)
    for u, v in list(graph.edges):
        if rng.random() >= rewiring:
            continue
        free = [w for w in range(n) if w != u and not graph.has_edge(u, w)]
        if free:
            graph.remove_edge(u, v)
            graph.add_edge(u, int(rng.choice(free)))
    return _graph(n, graph.edges)


def connect(
    graph: nx.Graph,
    policy: str,
    seed: int | np.random.Generator,
    draw: Callable[[np.random.Generator], nx.Graph] | None = None,
) -> nx.Graph:
    """Deal with a graph that may be disconnected; a connected one is returned as it is.

    Args:
        graph: nodes 0 … n−1.
        policy: "allow" leaves it; "bridge" joins its parts by the fewest edges, see `bridged`;
            "resample" draws others until one is connected, at most 100 times.
        seed: of the bridges or draws.
        draw: makes another graph of the same kind, for "resample".

    Raises:
        ValueError: another policy, "resample" without `draw` or without a connected draw.
    """
    if policy not in POLICIES:
        raise ValueError(f"graph.connect={policy!r}: allowed: {', '.join(POLICIES)}")
    if policy == "allow" or len(graph) < 2 or nx.is_connected(graph):
        return graph
    if policy == "bridge":
        return bridged(graph, seed=seed)
    if draw is None:
        raise ValueError("graph.connect=resample: needs a way to draw another graph")
    rng = np.random.default_rng(seed)
    for _ in range(CONNECT_DRAWS):
        found = draw(rng)
        if nx.is_connected(found):
            return found
    raise ValueError(
        f"graph.connect=resample: none of {CONNECT_DRAWS} draws on {len(graph)} clients was "
        "connected; allowed are denser graphs, or graph.connect=bridge"
    )


def bridged(graph: nx.Graph, *, seed: int | np.random.Generator) -> nx.Graph:
    """Join the parts of a graph by the fewest edges: parts in random order, each to the one before.

    A connected graph is returned as it is.
    """
    parts = sorted(sorted(part) for part in nx.connected_components(graph))
    if len(parts) < 2:
        return graph
    rng = np.random.default_rng(seed)
    order = [parts[i] for i in rng.permutation(len(parts))]
    joins = [(int(rng.choice(one)), int(rng.choice(other))) for one, other in pairwise(order)]
    return _graph(len(graph), [*graph.edges, *joins])


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


def _check_small_world(n: int, neighbours: int, rewiring: float) -> None:
    if not (_whole(neighbours) and neighbours >= 0):
        raise ValueError(f"graph.neighbours={neighbours}: allowed are whole numbers from 0")
    if n <= neighbours:
        raise ValueError(
            f"data.clients={n}: graph.name=watts_strogatz needs more than {neighbours} clients"
        )
    if not 0 <= rewiring <= 1:
        raise ValueError(f"graph.rewiring={rewiring}: allowed are values from 0 to 1")


def _whole(value: float) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


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
