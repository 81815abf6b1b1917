"""RunConfig: everything that decides a run, as one frozen, validated value.

Parts are addressed by dotted keys (`merge.epsilon`). Every leaf is an int, float, str or bool,
never None, so that the whole configuration fits typed Parquet columns. This module is light (no
torch, no Ray): bad input is refused before anything starts.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, Field, ValidationError, model_validator

from fedscale import rules
from fedscale.keys import leaves
from fedscale.parts import (
    BackboneConfig,
    DataConfig,
    GraphConfig,
    HeadConfig,
    LocalConfig,
    MergeConfig,
    Part,
    PromptConfig,
    RegimeConfig,
    ServerConfig,
)

LAYOUT_KEYS = ("workers", "clients_per_worker", "cpus_per_worker", "gpus_per_worker")
"""Keys that say where a run is computed, not what it is: they do not enter `run_id`."""


class ConfigError(ValueError):
    """Bad input, in one line: which key, which value, what is allowed."""


class RunConfig(Part):
    """One run: a method on data, over a graph, with a seed."""

    method: str = "dfrost"
    scale: Literal["offline", "paper"] = "paper"
    case: str = ""
    """Name of the sweep's case that this run belongs to; a label, like `scale`."""
    seed: Annotated[int, Field(ge=0, le=2**62)] = 0
    rounds: Annotated[int, Field(ge=0, le=99_999)] = 40
    """0 with `regime.name=ssdfl`: the run forms its clusters and ends."""
    eval_every: Annotated[int, Field(ge=1, le=99_999)] = 1
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    diagnostics: bool = False
    """Record what theorems bound: merge_objective, merge_delta, merge_bound (Theorem 1 of D-FROST),
    in cycles gaps and stationarity beside their bounds (28), (31), (32) of SSD-FL. Costs time."""
    data: DataConfig = DataConfig()
    backbone: BackboneConfig = BackboneConfig()
    prompts: PromptConfig = PromptConfig()
    local: LocalConfig = LocalConfig()
    merge: MergeConfig = MergeConfig()
    graph: GraphConfig = GraphConfig()
    regime: RegimeConfig = RegimeConfig()
    head: HeadConfig = HeadConfig()
    server: ServerConfig = ServerConfig()
    workers: Annotated[int, Field(ge=0, le=100_000)] = 0
    """ClientWorkers of a run; 0 = in this process, without Ray."""
    clients_per_worker: Annotated[str, Field(pattern=r"^(auto|[1-9][0-9]{0,8})$")] = "auto"
    cpus_per_worker: Annotated[int, Field(ge=1, le=1024)] = 1
    """Threads of a worker, and what Ray reserves for it."""
    gpus_per_worker: Annotated[
        str, Field(pattern=r"^(auto|[0-9]+(\.[0-9]*)?([eE]-?[0-9]+)?|\.[0-9]+)$")
    ] = "auto"
    """Share of a GPU per worker: 0, 1, 2, … or 1/k; auto = 1 where there are GPUs, else 0."""

    @model_validator(mode="before")
    @classmethod
    def _layout_as_text(cls, values: Any) -> Any:
        if isinstance(values, Mapping):
            values = dict(values)
            for key in ("clients_per_worker", "gpus_per_worker"):
                if isinstance(values.get(key), int | float) and not isinstance(values[key], bool):
                    values[key] = f"{values[key]:g}"
        return values

    @model_validator(mode="after")
    def _cross_checks(self) -> RunConfig:
        rules.check(self)
        self.blocks()
        gpu_share(self.gpus_per_worker)
        return self

    def blocks(self) -> list[range]:
        """Return the contiguous block of clients of each worker (one block when `workers=0`)."""
        clients, per = self.data.clients, self.clients_per_worker
        count = self.workers
        if per != "auto":
            count = -(-clients // int(per))
            if self.workers not in (0, count):
                raise ValueError(
                    f"clients_per_worker={per}: {clients} clients then need workers={count} "
                    f"(or 0 = unset), got workers={self.workers}"
                )
        if count > clients:
            raise ValueError(
                f"workers={count}: at most one per client, allowed 0 to data.clients={clients}"
            )
        bounds = [i * clients // max(count, 1) for i in range(max(count, 1) + 1)]
        if per != "auto":
            bounds = [min(i * int(per), clients) for i in range(count + 1)]
        return [range(a, b) for a, b in pairwise(bounds)]

    @property
    def cycles(self) -> bool:
        """Whether `rounds` counts cycles of τ_a + τ_r steps (SSD-FL and its baselines)."""
        return self.regime.name in ("ssdfl", "sdfl", "pdfl", "stc", "cstc")

    @property
    def total_steps(self) -> int:
        """Steps of the whole run, the last number in the records' `round`."""
        if self.cycles:
            return self.rounds * (self.regime.tau_a + self.regime.tau_r)
        return self.rounds + self.head.restat

    @property
    def analytic(self) -> bool:
        """Whether clients send statistics from which heads are computed."""
        return self.head.name != "trained"

    @property
    def trains(self) -> bool:
        """Whether clients have anything to train."""
        return self.head.name == "trained" or self.prompts.count > 0

    @property
    def remembers(self) -> bool:
        """Whether optimizers go on from one step to the next."""
        return self.local.carry or (self.cycles and self.regime.tau_a > 1)

    @property
    def uses_ray(self) -> bool:
        """Whether the clients live in worker processes."""
        return self.workers > 0 or self.clients_per_worker != "auto"

    def flat(self) -> dict[str, int | float | str | bool]:
        """Return every leaf under its dotted key, in declaration order."""
        return dict(leaves(self.model_dump()))

    def json_text(self) -> str:
        """Return the canonical JSON: sorted keys, no spaces."""
        return json.dumps(self.model_dump(), sort_keys=True, separators=(",", ":"))

    @property
    def run_id(self) -> str:
        """Name of the run: method, seed and a hash of all keys but the layout and the labels."""
        content = {k: v for k, v in self.flat().items() if k not in (*LAYOUT_KEYS, "scale", "case")}
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return f"{self.method}-s{self.seed}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    def replace(self, overrides: Mapping[str, Any]) -> RunConfig:
        """Return a copy with dotted keys changed, validated again.

        Raises:
            ConfigError: an unknown key or a value that is not allowed.
        """
        return from_flat({**self.flat(), **_known(overrides)})


def gpu_share(text: str) -> float:
    """Return the GPUs of a worker, rounded to a share that packs: 0, 1/k or a whole number.

    Shares other than 1/k never fill a GPU and leave actors pending for ever, so 0.4 becomes 1/3.
    `auto` gives -1.

    Raises:
        ValueError: more than one GPU but not a whole number.
    """
    if text == "auto":
        return -1.0
    share = float(text)
    if share > 1 and share != int(share):
        raise ValueError(f"gpus_per_worker={text}: allowed: 0, 1/k (0.5, 0.25, …), 1, 2, 3, …")
    if share == 0 or share >= 1:
        return share
    if share < 1e-3:
        raise ValueError(f"gpus_per_worker={text}: allowed: 0, 1/k with k up to 1000, 1, 2, …")
    per_gpu = math.ceil(1 / share - 1e-2)
    return math.floor(1e4 / per_gpu) / 1e4


KEYS: dict[str, Any] = dict(leaves(RunConfig.model_construct().model_dump()))
"""Every dotted key with its default."""


def _known(overrides: Mapping[str, Any]) -> dict[str, Any]:
    for key in overrides:
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, n=1) or [
                k for k in KEYS if k.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]
            ]
            hint = f"did you mean {near[0]}?" if near else f"allowed: {', '.join(KEYS)}"
            raise ConfigError(f"{key}={overrides[key]}: unknown key; {hint}")
    return dict(overrides)


def from_flat(values: Mapping[str, Any]) -> RunConfig:
    """Build a RunConfig from dotted keys (missing ones take their defaults).

    Raises:
        ConfigError: one line naming the key, the value and what is allowed.
    """
    tree: dict[str, Any] = {}
    for key, value in _known(values).items():
        *path, leaf = key.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[leaf] = value
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(one_line(error)) from None


def from_json(text: str) -> RunConfig:
    """Read back what `RunConfig.json_text` wrote.

    Raises:
        ConfigError: the text is not a valid configuration.
    """
    try:
        return RunConfig.model_validate_json(text)
    except ValidationError as error:
        raise ConfigError(one_line(error)) from None


def one_line(error: ValidationError) -> str:
    """Put a pydantic error into one line: key=value: what is allowed."""
    found = []
    for item in error.errors():
        message = str(item["msg"]).removeprefix("Value error, ")
        key = ".".join(str(part) for part in item["loc"])
        if key:
            message = f"{key}={item['input']}: {message[0].lower()}{message[1:]}"
        found.append(" ".join(message.split()))
    return "; ".join(found)


def parse_overrides(words: Iterable[str]) -> dict[str, str]:
    """Read `key=value` words as typed on a command line.

    Raises:
        ConfigError: a word without '=', or a key given twice.
    """
    found: dict[str, str] = {}
    for word in words:
        key, sign, value = word.partition("=")
        if not sign or not key:
            raise ConfigError(f"{word!r}: expected key=value, for example merge.epsilon=0.1")
        if key in found:
            raise ConfigError(f"{key}={value}: given twice (before: {found[key]})")
        found[key] = value
    return _known(found)


def choices(part: type[BaseModel], field: str) -> tuple[str, ...]:
    """Return the allowed values of a Literal field, for contract tests and help texts."""
    return get_args(part.model_fields[field].annotation)
