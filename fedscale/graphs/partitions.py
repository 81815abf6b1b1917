"""Clusters of a network and their splits, computed once per set of devices."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import networkx as nx
import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from fedscale.graphs import conductance
from fedscale.graphs.fiedler import LANCZOS, Matrix, spectrum

log = logging.getLogger(__name__)

WIDE = 64
"""Above so many devices `maxmin` tries only the 16 smallest cuts."""

TRIED = 16

EQUAL = 1e-12
"""Conductances this near are equal."""


@dataclass(frozen=True, eq=False)
class Part:
    """A cluster by itself, mixing by Metropolis weights Ã of its induced subgraph.

    Attributes:
        devices: sorted.
        phi: conductance of Ã; 0 for one device and for a disconnected cluster.
        exact: whether phi is exact (at most 14 devices), not the best of a sweep.
        lambda2, lambda_min: eigenvalues of Ã; both 1 for one device.
        order: places in `devices` in Fiedler order.
    """

    devices: tuple[int, ...]
    phi: float
    exact: bool
    lambda2: float
    lambda_min: float
    order: np.ndarray


class Partitions:
    """A network, and what was computed of sets of its devices.

    Attributes:
        devices: N.
        links: (E, 2), sorted, the smaller device first.
        lazy: whether devices mix by (I + W)/2.
    """

    def __init__(self, graph: nx.Graph, lazy: bool) -> None:
        if not isinstance(graph, nx.Graph) or graph.is_directed():
            raise ValueError(
                f"graph={type(graph).__name__}: allowed are undirected networkx graphs"
            )
        if not len(graph) or set(graph) != set(range(len(graph))):
            raise ValueError(f"graph={graph}: allowed are graphs on the nodes 0 … N−1, N from 1")
        self.devices, self.lazy = len(graph), lazy
        # Sorted and each once, so that nothing depends on how the graph was put together.
        pairs = sorted({(min(e[:2]), max(e[:2])) for e in graph.edges if e[0] != e[1]})
        self.links = np.array(pairs, dtype=int).reshape(-1, 2)
        self._parts: dict[tuple[int, ...], Part] = {}
        self._splits: dict[tuple[tuple[int, ...], str], tuple[Part, Part]] = {}
        self._values: dict[tuple[str, tuple[int, ...]], float] = {}

    def start(self) -> tuple[list[Part], list[int]]:
        """Return the connected components with links, and the devices without."""
        n, (u, v) = self.devices, self.links.T
        linked = csr_array((np.ones(len(u)), (u, v)), shape=(n, n))
        group = connected_components(linked, directed=False)[1]
        groups = [np.flatnonzero(group == g) for g in range(group.max() + 1)]
        groups.sort(key=lambda rows: int(rows[0]))
        isolated = [int(rows[0]) for rows in groups if len(rows) == 1]
        return [self.part(tuple(rows.tolist())) for rows in groups if len(rows) > 1], isolated

    def part(self, devices: tuple[int, ...]) -> Part:
        """Return the cluster of these devices (sorted)."""
        if devices not in self._parts:
            self._parts[devices] = _measure(devices, self.weights(devices))
        return self._parts[devices]

    def inside(self, devices: tuple[int, ...]) -> np.ndarray:
        """Return the rows of `links` that join two of these devices."""
        member = np.zeros(self.devices, dtype=bool)
        member[list(devices)] = True
        return np.flatnonzero(member[self.links].all(axis=1))

    def weights(self, devices: tuple[int, ...]) -> Matrix:
        """Return Ã of these devices (sorted), (n, n); sparse above 200 devices."""
        place = np.zeros(self.devices, dtype=int)
        place[list(devices)] = np.arange(len(devices))
        u, v = place[self.links[self.inside(devices)]].T
        return metropolis(len(devices), u, v, self.lazy)

    def remembered(self, name: str, part: Part, compute: Callable[[], float]) -> float:
        """Return a number of a cluster, computed once per name and set of devices."""
        key = name, part.devices
        if key not in self._values:
            self._values[key] = compute()
        return self._values[key]

    def split(self, part: Part, how: str) -> tuple[Part, Part]:
        """Split a cluster of at least two devices at a prefix of its Fiedler order.

        Args:
            part: the cluster.
            how: "maxmin": the prefix with the largest min(Φ of the two parts), as Algorithm 2
                has it; above 64 devices only the 16 smallest cuts with connected parts of at
                least 2 are tried. "cut": the smallest cut ratio (3) among prefixes with both
                parts connected and of at least 2 devices (all prefixes if there is none); ties
                go to the most balanced, then to the smallest prefix.
        """
        key = part.devices, how
        if key not in self._splits:
            A, n = self.weights(part.devices), len(part.devices)
            ratios = conductance.cuts(A, part.order)
            whole = conductance.whole_prefixes(A, part.order)
            whole[[0, -1]] = False
            sizes = np.arange(1, n)
            usable = sizes[whole] if whole.any() else sizes
            if how == "cut":
                size = _smallest_cut(ratios, usable, n)
            elif n <= WIDE:
                size = self._maxmin(part, sizes)
            else:
                smallest = np.argsort(np.round(ratios[usable - 1], 12), kind="stable")[:TRIED]
                log.info("maxmin: %d of %d prefixes of a cluster tried", len(smallest), n - 1)
                size = self._maxmin(part, np.sort(usable[smallest]))
            a, b = (self.part(devices) for devices in _pieces(part, size))
            self._splits[key] = (a, b) if a.devices[0] < b.devices[0] else (b, a)
        return self._splits[key]

    def _maxmin(self, part: Part, sizes: np.ndarray) -> int:
        best, found = -1.0, int(sizes[0])
        for size in sizes.tolist():
            lower = min(self._phi(devices) for devices in _pieces(part, size))
            if lower > best + EQUAL:
                best, found = lower, size
        return found

    def _phi(self, devices: tuple[int, ...]) -> float:
        # Trials of large clusters are many and rarely come back: they would fill the memory.
        if len(devices) <= WIDE:
            return self.part(devices).phi
        return _measure(devices, self.weights(devices)).phi


def metropolis(n: int, u: np.ndarray, v: np.ndarray, lazy: bool) -> Matrix:
    """Return `mixing.metropolis` of the graph with links u–v on n nodes; sparse above 200."""
    degree = np.bincount(u, minlength=n) + np.bincount(v, minlength=n)
    weights = 1.0 / (1.0 + np.maximum(degree[u], degree[v])) / (2.0 if lazy else 1.0)
    sums = np.bincount(u, weights, minlength=n) + np.bincount(v, weights, minlength=n)
    if n <= LANCZOS:
        dense = np.diag(1.0 - sums)
        dense[u, v] = dense[v, u] = weights
        return dense
    node = np.arange(n)
    rows, columns = np.concatenate([u, v, node]), np.concatenate([v, u, node])
    return csr_array((np.concatenate([weights, weights, 1.0 - sums]), (rows, columns)), (n, n))


def _measure(devices: tuple[int, ...], A: Matrix) -> Part:
    found, exact = spectrum(A), len(devices) <= conductance.EXACT
    phi = 0.0
    if conductance.connected(A):
        phi = conductance.exact(A) if exact else conductance.swept(A, found.order)
    return Part(devices, phi, exact, found.lambda2, found.lambda_min, found.order)


def _smallest_cut(ratios: np.ndarray, usable: np.ndarray, n: int) -> int:
    usable = usable[ratios[usable - 1] <= ratios[usable - 1].min() + EQUAL]
    return int(usable[np.lexsort((usable, np.abs(2 * usable - n)))[0]])


def _pieces(part: Part, size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the devices of the first `size` places of the Fiedler order, and the others."""
    devices = np.array(part.devices)
    first, second = np.sort(devices[part.order[:size]]), np.sort(devices[part.order[size:]])
    return tuple(first.tolist()), tuple(second.tolist())
