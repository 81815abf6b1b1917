"""The parts of a run's configuration, each a frozen, validated value; see `config.RunConfig`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1, le=10**9)]
Positive = Annotated[float, Field(gt=0, le=1e30, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, le=1e30, allow_inf_nan=False)]
Probability = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Fraction = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]


class Part(BaseModel):
    """Frozen; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class DataConfig(Part):
    """Which images there are and who holds them."""

    name: str = "five"
    partition: Literal["dirichlet", "extreme", "labels_per_client", "iid"] = "dirichlet"
    alpha: Positive = 0.1
    """Dirichlet concentration (`dirichlet` only)."""
    labels_per_client: Count = 3
    """Classes per client (`labels_per_client` only)."""
    clients: Count = 50
    train_size: Annotated[int, Field(ge=0, le=10**9)] = 0
    """Training images per domain, balanced over classes; 0 = the catalogue's size."""
    test_size: Annotated[int, Field(ge=0, le=10**9)] = 0
    min_size: Annotated[int, Field(ge=0, le=10**9)] = 2
    """Samples that every client gets at least (`dirichlet` only)."""
    allow_empty: bool = False


class BackboneConfig(Part):
    """The frozen network, or `cnn`: a small network that clients train as a whole."""

    name: Literal["nano", "vit_b32", "deit_b16", "convit_base", "clip_b16", "cnn"] = "vit_b32"
    weights: Annotated[str, Field(min_length=1)] = "pretrained"
    """`pretrained`, `random` (untrained), or the path of a .safetensors file; not read by `cnn`."""
    channels: Annotated[str, Field(pattern=r"^[1-9][0-9]{0,3}(-[1-9][0-9]{0,3}){0,7}$")] = (
        "32-64-128-128-256"
    )
    """Channels of the convolutions (`cnn` only)."""


class PromptConfig(Part):
    """The tokens that clients train."""

    count: Annotated[int, Field(ge=0, le=10_000)] = 10
    """Prompts per client; 0 = none, the features are the backbone's own."""
    init: Literal["shared", "per_client"] = "shared"
    """Initial prompts (and CNN weights): one draw for all clients, or one each."""
    pool: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Prompts in a pool from which every image is given `count`; 0 = no pool."""
    pull: NotNegative = 0.01
    """Weight of the term that draws selected prompts to their images' queries (pool only)."""
    limit: Annotated[int, Field(ge=1, le=100_000)] = 200
    """Prompts per client at which a run with `merge.name=pfpt` is ended."""


class LocalConfig(Part):
    """What a client does between two exchanges."""

    optimizer: Literal["adam", "sgd", "sam"] = "adam"
    lr: Positive = 1e-4
    prompt_lr: NotNegative = 0.0
    """Learning rate of the prompts; 0 = `lr`."""
    epochs: Annotated[int, Field(ge=1, le=10_000)] = 5
    batch_size: Annotated[int, Field(ge=1, le=1_000_000)] = 16
    momentum: Probability = 0.0
    """Heavy-ball momentum (`sgd` and `sam`)."""
    mu: NotNegative = 0.0
    """Proximal weight of the prompts (of everything where there are none)."""
    rho: Positive = 0.01
    """Radius of adaptive sharpness-aware minimisation (`sam` only)."""
    devices: Literal["same", "mixed"] = "same"
    """`mixed`: each client draws SGD, proximal SGD or momentum SGD (SSD-FL)."""
    carry: bool = False
    """Keep the optimizer's moments from round to round instead of starting anew."""


class MergeConfig(Part):
    """How a neighbourhood's payloads become one; ε, λ, σ², steps, start, schedule: `ot` only."""

    name: Literal["ot", "mean", "pfpt"] = "ot"
    epsilon: Positive = 0.01
    lam: NotNegative = 1e-3
    sigma2: Positive = 1.0
    steps: Annotated[int, Field(ge=1, le=100_000)] = 50
    start: Literal["previous", "updated", "sample"] = "previous"
    schedule: Literal["fixed", "anneal"] = "fixed"
    epsilon_init: Positive = 1.0
    """First ε of `schedule=anneal`."""
    tolerance: NotNegative = 0.0
    """Stop a client's merge when its step change Δ falls below; 0 = always `steps`."""
    loops: Annotated[int, Field(ge=1, le=1000)] = 5
    """Alternations of score step and assignment (`pfpt` only)."""
    head: Literal["mixed", "local"] = "mixed"


class GraphConfig(Part):
    """Who talks to whom in a round."""

    name: Literal[
        "ring",
        "grid",
        "erdos_renyi",
        "regular",
        "complete",
        "barabasi_albert",
        "random_geometric",
        "watts_strogatz",
    ] = "regular"
    degree: Count = 5
    """Neighbours per client (`regular`), expected neighbours (`erdos_renyi`)."""
    probability: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    """Edge probability of `erdos_renyi`; 0 = degree / (clients − 1)."""
    resample: bool = True
    """Draw a new graph each round."""
    connect: Literal["allow", "bridge", "resample"] = "allow"
    """Of a disconnected graph: keep it, add the fewest edges, or draw again."""
    link_drop: Probability = 0.0
    """Probability that an edge fails in a round."""
    participation: Fraction = 1.0
    """Share of clients that take part in a round."""


class RegimeConfig(Part):
    """In which order clients train and exchange; see regimes/."""

    name: Literal["gossip", "ssdfl", "sdfl", "pdfl", "stc", "cstc", "server"] = "gossip"
    """`rounds` counts rounds, and in `ssdfl` and its baselines cycles of τ_a + τ_r steps."""
    train_rounds: Annotated[int, Field(ge=0, le=99_999)] = 0
    """Rounds in which clients train before they only mix (`gossip`); 0 = all."""
    average: Literal["samples", "uniform", "none"] = "samples"
    """What a server averages by: sample counts, nothing, or not at all (`server`)."""
    tau_a: Annotated[int, Field(ge=1, le=10_000)] = 1
    tau_r: Annotated[int, Field(ge=0, le=10_000)] = 1
    steps_per_instance: Annotated[int, Field(ge=0, le=10**6)] = 0
    """Mini-batches per training instance; 0 = `local.epochs` epochs."""
    rule: Literal["sound", "literal"] = "sound"
    accept: Literal["by_rule", "first", "score", "cycle"] = "by_rule"
    split: Literal["by_rule", "cut", "maxmin"] = "by_rule"
    order: Literal["by_rule", "cure", "literal"] = "by_rule"
    threshold: Literal["plain", "with_tau_a"] = "plain"
    threshold_size: Literal["network", "cluster"] = "network"
    lazy: bool = False
    """Mix with (I + W)/2."""
    tolerance: Positive = 10.0
    """Δtol of the conductance threshold."""
    bound: NotNegative = 0.0
    """B, the bound on gradients; 0 = estimated at the initial point."""
    gamma: NotNegative = 0.0
    """γ, the smoothness of the losses; 0 = estimated at the initial point."""


class HeadConfig(Part):
    """Where the classifier comes from."""

    name: Literal["trained", "ridge", "fedcgs", "fedpft"] = "trained"
    """`trained` by clients; `ridge` (FedOPAL, AFL), `fedcgs`: in closed form from sums of
    statistics; `fedpft`: by a server, on samples of the clients' mixtures."""
    lam: NotNegative = 1e-6
    """λ of `ridge`, γ of `fedcgs`."""
    normalise: bool = False
    """Scale features to unit norm."""
    restat: bool = False
    """Compute the statistics once more under the averaged prompts (a second communication)."""


class ServerConfig(Part):
    """What a server learns from the clients' networks."""

    name: Literal["none", "dense", "coboosting"] = "none"
    epochs: Annotated[int, Field(ge=1, le=100_000)] = 50
    lr: Positive = 0.01
    """Learning rate of the distilled network."""
    generator_steps: Annotated[int, Field(ge=1, le=100_000)] = 30
    """Steps of each epoch's generator."""
    generator_width: Annotated[int, Field(ge=1, le=4096)] = 64
    """Channels of its last hidden layer."""
    student_steps: Annotated[int, Field(ge=0, le=10**6)] = 0
    """Steps of the distilled network per epoch at most; 0 = all images so far."""
