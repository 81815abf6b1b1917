"""Problem: the data and the frozen weights that runs share, and the learner built on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedscale.config import ConfigError, RunConfig
from fedscale.data import catalogue
from fedscale.data.catalogue import Dataset
from fedscale.local.cohort import COUNT
from fedscale.local.prompting import PromptLearner
from fedscale.models import backbone
from fedscale.models.cnn import Cnn
from fedscale.models.prompted import Prompted, native_bfloat16

Learner = PromptLearner | Cnn


@dataclass(frozen=True)
class Problem:
    """What all runs on the same data and backbone share (read-only).

    Attributes:
        dataset: images and labels.
        backbone: frozen weights by name; empty for networks that are trained as a whole.
        grey: whether all images have three equal channels.
    """

    dataset: Dataset
    backbone: dict[str, np.ndarray]
    grey: bool


def load_problem(config: RunConfig) -> Problem:
    """Load a configuration's data and backbone weights.

    Raises:
        ConfigError: one line that says what is missing and how to get it.
    """
    try:
        dataset = catalogue.load(config.data.name, config.data.train_size, config.data.test_size)
        arrays = {}
        if config.backbone.name != "cnn":
            module = backbone.build(config.backbone.name, config.backbone.weights)
            arrays = backbone.to_arrays(module)
    except (catalogue.DataUnavailable, backbone.WeightsUnavailable) as error:
        raise ConfigError(str(error)) from None
    images = (*dataset.train.images, *dataset.test.images)
    grey = all(bool((x == x[..., :1]).all()) for x in images)
    return Problem(dataset, arrays, grey)


def problem_key(config: RunConfig) -> tuple[Any, ...]:
    """Return what two configurations must have in common to share a Problem."""
    data = config.data
    name = config.backbone.name
    return data.name, data.train_size, data.test_size, name, config.backbone.weights


def resolve_precision(precision: str, device: str) -> str:
    """Return "float32" or "bfloat16" for a device; `auto` takes bfloat16 where it is native."""
    if precision != "auto":
        return precision
    if device.startswith("cuda"):
        return "bfloat16" if torch.cuda.is_bf16_supported() else "float32"
    return "bfloat16" if native_bfloat16() else "float32"


def learner_key(config: RunConfig, precision: str) -> tuple[Any, ...]:
    """Return what two configurations must have in common to share a learner's cached inputs."""
    prompts = config.prompts
    return (
        problem_key(config),
        precision,
        config.backbone.channels,
        prompts.count if prompts.pool else 0,
        prompts.pull,
        config.head.normalise,
    )


def build_learner(config: RunConfig, problem: Problem, precision: str, device: str) -> Learner:
    """Return what clients train: prompts and a head on a frozen backbone, or a CNN."""
    if config.backbone.name == "cnn":
        sides = {image.shape[1:3] for image in problem.dataset.train.images}
        side = sides.pop() if len(sides) == 1 else (32, 32)
        return Cnn(
            num_classes=problem.dataset.num_classes,
            image_size=side[0] if side[0] == side[1] else 32,
            channels=1 if problem.grey else 3,
            widths=tuple(int(word) for word in config.backbone.channels.split("-")),
            device=torch.device(device),
        )
    name, prompts = config.backbone.name, config.prompts
    module = backbone.from_arrays(name, problem.backbone)
    model = Prompted(module, backbone.BACKBONES[name], precision=precision, device=device)
    selected = prompts.count if prompts.pool else 0
    return PromptLearner(model, selected, prompts.pull, config.head.normalise)


def initial_payload(
    config: RunConfig, learner: Learner, num_classes: int, clients: range
) -> dict[str, torch.Tensor]:
    """Return what the clients of a block hold before the first round."""
    prompts = config.prompts
    if not isinstance(learner, PromptLearner):
        return learner.initial(list(clients), seed=config.seed, init=prompts.init)
    payload = learner.initial(
        list(clients),
        count=prompts.pool or prompts.count,
        patch=backbone.BACKBONES[config.backbone.name].patch,
        num_classes=num_classes,
        init=prompts.init,
        seed=config.seed,
    )
    if config.merge.name == "pfpt":
        payload[COUNT] = torch.full((len(clients),), prompts.count)
    return payload
