"""Clusters of a network and their splits, computed once per set of devices."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import networkx as nx
import numpy as np

from fedscale.graphs import conductance, heterogeneity, mixing

log = logging.getLogger(__name__)

WIDE = 64
"""Above so many devices `maxmin` tries only the 16 smallest cuts."""

_TRIED = 16
_EQUAL = 1e-12


@dataclass(frozen=True, eq=False)
class Part:
    """A cluster by itself.

    Attributes:
        devices: sorted.
        weights: Ã, Metropolis recomputed on the induced subgraph.
        phi: its conductance; 0 for one device and for a disconnected cluster.
        exact: whether phi is exact, not the best of a sweep.
        lambda2, lambda_min: eigenvalues of Ã.
    """

    devices: tuple[int, ...]
    weights: np.ndarray
    phi: float
    exact: bool
    lambda2: float
    lambda_min: float


class Partitions:
    """A network whose clusters, splits and heterogeneity scores are remembered."""

    def __init__(
        self,
        graph: nx.Graph,
        lazy: bool,
        labels: Sequence[np.ndarray] | None,
        samples: Sequence[np.ndarray] | None,
        optimizers: Sequence[heterogeneity.Optimizer] | None,
    ) -> None:
        if graph.is_directed() or set(graph) != set(range(len(graph))) or not len(graph):
            raise ValueError(f"graph={graph}: allowed are undirected graphs on the nodes 0 … N−1")
        # Sorted, so that nothing depends on the order in which edges were added.
        self.graph = nx.empty_graph(len(graph))
        self.graph.add_edges_from(sorted(tuple(sorted(e)) for e in graph.edges if e[0] != e[1]))
        self.lazy, self.labels, self.samples, self.optimizers = lazy, labels, samples, optimizers
        self._parts: dict[tuple[int, ...], Part] = {}
        self._splits: dict[tuple[tuple[int, ...], str], tuple[Part, Part]] = {}
        self._pairs: dict[tuple[int, int], float] = {}

    def start(self) -> tuple[list[Part], list[int]]:
        """Return the connected components with links, and the devices without."""
        groups = sorted(sorted(group) for group in nx.connected_components(self.graph))
        isolated = [group[0] for group in groups if len(group) == 1]
        return [self.part(tuple(group)) for group in groups if len(group) > 1], isolated

    def part(self, devices: tuple[int, ...]) -> Part:
        """Return the cluster of these devices (sorted)."""
        if devices not in self._parts:
            inside = self.graph.subgraph(devices)
            names = {device: row for row, device in enumerate(devices)}
            weights = mixing.metropolis(nx.relabel_nodes(inside, names), self.lazy)
            phi = conductance.conductance(weights)
            lambda2, lambda_min = conductance.spectrum(weights)
            exact = len(devices) <= conductance.EXACT
            self._parts[devices] = Part(devices, weights, phi, exact, lambda2, lambda_min)
        return self._parts[devices]

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
            order = conductance.fiedler_order(part.weights)
            ratios = conductance.cuts(part.weights, order)
            whole = conductance.whole_prefixes(part.weights, order)
            n = len(order)
            whole[[0, -1]] = False
            sizes = np.arange(1, n)
            usable = sizes[whole] if whole.any() else sizes
            if how == "cut":
                lean = np.abs(2 * usable - n)
                best = np.lexsort((usable, lean, np.round(ratios[usable - 1], 12)))[0]
                cut = int(usable[best])
            else:
                cut = self._maxmin(part, order, ratios, sizes, usable)
            self._splits[key] = self._pieces(part, order, cut)
        return self._splits[key]

    def _maxmin(
        self,
        part: Part,
        order: np.ndarray,
        ratios: np.ndarray,
        sizes: np.ndarray,
        usable: np.ndarray,
    ) -> int:
        tried = sizes
        if len(order) > WIDE:
            tried = np.sort(usable[np.argsort(ratios[usable - 1], kind="stable")[:_TRIED]])
            log.info("maxmin: %d of %d prefixes of a cluster tried", len(tried), len(sizes))
        best, found = -1.0, int(tried[0])
        for size in tried:
            a, b = self._pieces(part, order, int(size))
            if min(a.phi, b.phi) > best + _EQUAL:
                best, found = min(a.phi, b.phi), int(size)
        return found

    def _pieces(self, part: Part, order: np.ndarray, size: int) -> tuple[Part, Part]:
        devices = np.array(part.devices)
        a, b = (
            self.part(tuple(sorted(devices[rows].tolist())))
            for rows in (order[:size], order[size:])
        )
        return (a, b) if a.devices[0] < b.devices[0] else (b, a)

    def heterogeneity(self, part: Part) -> float:
        """Return α_s = α_s^o + α_s^d of a cluster."""
        found = 0.0
        if self.optimizers is not None:
            own = [self.optimizers[device] for device in part.devices]
            found += heterogeneity.optimizer_score(own)
        if self.labels is not None:
            edges = self.graph.subgraph(part.devices).edges
            pairs = [self._pair(min(edge), max(edge)) for edge in edges]
            found += heterogeneity.data_score(pairs)
        return found

    def _pair(self, u: int, v: int) -> float:
        if (u, v) not in self._pairs:
            assert self.labels is not None
            samples = None if self.samples is None else (self.samples[u], self.samples[v])
            labels = self.labels[u], self.labels[v]
            self._pairs[u, v] = heterogeneity.pair_divergence(labels, samples)
        return self._pairs[u, v]
