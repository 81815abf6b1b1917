"""What frozen features are worth: a linear probe on the four offline domains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from rich.table import Table
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from timm.models.vision_transformer import VisionTransformer

from fedscale.data import catalogue
from fedscale.models import backbone
from fedscale.models.prompted import Prompted

STRENGTHS = (0.001, 0.01, 0.1, 0.3, 1.0, 3.0)
PROTOCOL = (
    "Logistic regression (scikit-learn, L2) on CLS features in float32, standardised by the "
    f"training set; C is the one of {STRENGTHS} that is best on a stratified fifth of the training "
    "set (seed 0, the smallest of equals); then all training images are used."
)


@dataclass(frozen=True)
class Row:
    """One domain: images of its two splits, and test accuracy and C of every model by name."""

    domain: str
    train: int
    test: int
    accuracy: dict[str, float]
    strength: dict[str, float]


def probe(
    name: str,
    models: Mapping[str, VisionTransformer],
    domains: tuple[str, ...] = (),
    train_size: int = 0,
    test_size: int = 0,
) -> list[Row]:
    """Probe every model on every domain of the offline dataset.

    Args:
        name: the models' backbone, a key of `BACKBONES`.
        models: frozen models by the name they have in the table.
        domains: names of the domains to probe; () for all.
        train_size: training images per domain, a balanced subset; 0 for all.
        test_size: test images per domain, likewise.
    """
    data = catalogue.load("offline", train_size, test_size)
    rows = []
    for number, domain in enumerate(data.domains):
        if domains and domain not in domains:
            continue
        fit_y, test_y = (part.labels[part.domains == number] for part in (data.train, data.test))
        scores = {}
        for key, model in models.items():
            fit_x, test_x = (
                features(name, model, part.images[number]) for part in (data.train, data.test)
            )
            scores[key] = linear_probe(fit_x, fit_y, test_x, test_y)
        accuracy = {key: score for key, (score, _) in scores.items()}
        strength = {key: c for key, (_, c) in scores.items()}
        rows.append(Row(domain, len(fit_y), len(test_y), accuracy, strength))
    return rows


@torch.no_grad()
def features(name: str, model: VisionTransformer, images: np.ndarray) -> np.ndarray:
    """Return the CLS features (N, d) float32 of uint8 images (N, H, W, 3).

    Images are resized and normalised as in a run; the blocks are timm's own.
    """
    tokens = Prompted(model, backbone.spec_of(name)).tokens(images)
    return np.concatenate([model.norm(model.blocks(x))[:, 0].numpy() for x in tokens.split(512)])


def linear_probe(
    fit_x: np.ndarray, fit_y: np.ndarray, test_x: np.ndarray, test_y: np.ndarray
) -> tuple[float, float]:
    """Return (test accuracy, C) by `PROTOCOL`, of features (N, d) and labels (N,)."""
    scaler = StandardScaler().fit(fit_x)
    fit_x, test_x = scaler.transform(fit_x), scaler.transform(test_x)
    x, held_x, y, held_y = train_test_split(
        fit_x, fit_y, test_size=0.2, random_state=0, stratify=fit_y
    )

    def regression(strength: float) -> LogisticRegression:
        return LogisticRegression(C=strength, max_iter=1000)

    best = max(STRENGTHS, key=lambda c: regression(c).fit(x, y).score(held_x, held_y))
    return float(regression(best).fit(fit_x, fit_y).score(test_x, test_y)), best


def table(rows: list[Row]) -> Table:
    """Return the rows as a table for the terminal."""
    drawn = Table("domain", "train", "test", *rows[0].accuracy, title="Linear probe, test accuracy")
    for row in rows:
        cells = [f"{score:.3f} (C={row.strength[key]:g})" for key, score in row.accuracy.items()]
        drawn.add_row(row.domain, str(row.train), str(row.test), *cells)
    return drawn
