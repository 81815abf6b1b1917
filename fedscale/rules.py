"""What keys of a configuration must fit together: refused here, before anything starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedscale.data import catalogue, partition
from fedscale.graphs import topology

if TYPE_CHECKING:
    from fedscale.config import RunConfig


def check(config: RunConfig) -> None:
    """Refuse a configuration whose keys do not fit together.

    Raises:
        ValueError: one line naming the key, the value and what is allowed.
    """
    _data(config)
    _graph(config)
    _method(config)


def _data(config: RunConfig) -> None:
    data = config.data
    if data.name not in catalogue.CATALOGUE:
        raise ValueError(
            f"data.name={data.name!r}: unknown; allowed: {', '.join(catalogue.CATALOGUE)}"
        )
    domains = catalogue.CATALOGUE[data.name]
    sizes = [domain.size(True, data.train_size) for domain in domains]
    for domain in domains:
        domain.size(False, data.test_size)
    if data.partition == "iid":
        if data.clients > sum(sizes):
            raise ValueError(
                f"data.clients={data.clients}: more clients than the {sum(sizes)} training images"
            )
        return
    if data.clients < len(domains):
        raise ValueError(
            f"data.clients={data.clients}: {data.name} has {len(domains)} domains and each needs "
            "a client"
        )
    for index, (domain, size) in enumerate(zip(domains, sizes, strict=True)):
        here = data.clients // len(domains) + (index < data.clients % len(domains))
        needed = here * (data.min_size if data.partition == "dirichlet" else 1)
        if needed > size and not data.allow_empty:
            raise ValueError(
                f"data.clients={data.clients}: {here} clients share domain {domain.name} and need "
                f"{needed} of its {size} training images (data.train_size, data.min_size); "
                f"at most {size // max(needed // here, 1)} clients per domain"
            )
        if data.partition == "labels_per_client":
            partition.check_labels_per_client(here, data.labels_per_client, domain.classes)


def _graph(config: RunConfig) -> None:
    g, m = config.graph, config.merge
    if config.regime.name != "server":
        clients, probability = config.data.clients, g.probability or None
        topology.check(g.name, clients, degree=g.degree, probability=probability)
    if config.cycles and g.resample:
        raise ValueError(
            f"graph.resample=True: must be False when regime.name={config.regime.name} (clusters "
            "are formed once, on one graph)"
        )
    if m.schedule == "anneal" and m.epsilon_init < m.epsilon:
        raise ValueError(
            f"merge.epsilon_init={m.epsilon_init:g}: must be at least "
            f"merge.epsilon={m.epsilon:g} when merge.schedule=anneal"
        )
    if m.schedule == "anneal" and m.tolerance:
        raise ValueError(
            f"merge.tolerance={m.tolerance:g}: must be 0 when merge.schedule=anneal "
            "(an early stop would end the schedule before its last ε)"
        )


def _method(config: RunConfig) -> None:
    """Refuse combinations that mean nothing."""
    local, prompts, head = config.local, config.prompts, config.head
    cnn = config.backbone.name == "cnn"
    rules = (
        (
            config.merge.name != "mean" and cnn,
            f"merge.name={config.merge.name}: merges prompts; allowed with cnn: mean",
        ),
        (
            config.merge.name != "mean" and not cnn and not prompts.count,
            f"prompts.count=0: merge.name={config.merge.name} merges prompts; allowed: 1 or more, "
            "or merge.name=mean",
        ),
        (
            config.merge.name != "mean" and config.regime.name != "gossip",
            f"merge.name={config.merge.name}: needs regime.name=gossip; allowed in "
            f"{config.regime.name}: mean",
        ),
        (
            0 < prompts.pool < prompts.count,
            f"prompts.pool={prompts.pool}: must be 0 or at least prompts.count={prompts.count}",
        ),
        (
            config.merge.name == "pfpt" and prompts.pool > 0,
            f"prompts.pool={prompts.pool}: must be 0 when merge.name=pfpt",
        ),
        (
            config.merge.name == "pfpt" and prompts.limit < prompts.count,
            f"prompts.limit={prompts.limit}: must be at least prompts.count={prompts.count}",
        ),
        (
            local.devices == "mixed" and local.optimizer != "sgd",
            f"local.devices=mixed: devices draw kinds of SGD; local.optimizer={local.optimizer} "
            "must be sgd",
        ),
        (
            local.devices == "mixed" and (local.momentum > 0 or local.mu > 0),
            f"local.devices=mixed: devices draw their own; local.momentum={local.momentum:g} and "
            f"local.mu={local.mu:g} must be 0",
        ),
        (
            config.regime.accept == "cycle" and config.regime.tau_r == 0,
            "regime.tau_r=0: must be at least 1 when regime.accept=cycle",
        ),
        (
            config.rounds == 0 and config.regime.name != "ssdfl",
            f"rounds=0: must be at least 1 when regime.name={config.regime.name} (0 forms the "
            "clusters of ssdfl and ends)",
        ),
        (
            config.graph.participation < 1 and config.regime.name != "gossip",
            f"graph.participation={config.graph.participation:g}: must be 1 when "
            f"regime.name={config.regime.name}",
        ),
        (
            config.graph.link_drop > 0 and config.regime.name in ("server", "stc", "cstc"),
            f"graph.link_drop={config.graph.link_drop:g}: must be 0 when "
            f"regime.name={config.regime.name} (stc and cstc drop half of the links by themselves)",
        ),
        (
            config.regime.train_rounds > 0 and config.regime.name != "gossip",
            f"regime.train_rounds={config.regime.train_rounds}: must be 0 when "
            f"regime.name={config.regime.name}",
        ),
        (
            cnn and head.name != "trained",
            f"head.name={head.name}: needs a frozen backbone; allowed with cnn: trained",
        ),
        (
            head.name == "fedpft" and config.regime.name != "server",
            f"head.name=fedpft: a server learns it; regime.name={config.regime.name} must be "
            "server",
        ),
        (
            head.restat and (head.name == "trained" or config.regime.name != "server"),
            "head.restat=True: needs a head from statistics (ridge, fedcgs, fedpft) and "
            "regime.name=server",
        ),
        (
            config.server.name != "none" and not (cnn and config.regime.name == "server"),
            f"server.name={config.server.name}: distils CNNs; needs backbone.name=cnn and "
            "regime.name=server",
        ),
    )
    for broken, message in rules:
        if broken:
            raise ValueError(message)
