"""FedCGS: a Gaussian classifier from class sums and one shared covariance, in one round.

Guan et al. 2025, "Capture global feature statistics for one-shot federated learning".
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedscale.local.statistics import packed_size
from fedscale.server.analytic import FLOAT64, solve

NEVER = -math.log(1e300)
"""How far the score of a class without samples lies below another class's."""


def head(sums: Tensor, counts: Tensor, gram: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """Return W (d, K) and b (K,) float64; a sample's class is the largest of Wᵀf + b.

    With A = Σ f, B = Σ f fᵀ, N samples, N_c of class c and their mean μ_c:
    μ = A/N, S = (B − μAᵀ − Aμᵀ + Nμμᵀ)/(N − 1) + γI, W_c = S⁻¹μ_c,
    b_c = −½ μ_cᵀS⁻¹μ_c + log(N_c/N).

    S is the covariance around the common mean, as in the paper, and not the one within classes
    of linear discriminant analysis (LDA). The two classifiers are one where both covariances are
    the same, or classes are two and equally large; in general they differ.

    A class without samples copies the head of the largest class, 690 lower, so it is never
    predicted and losses stay finite.

    Args:
        sums: (d, K), sums of features per class; A is the sum of its columns.
        counts: (K,), N_c; by gossip they may be fractions.
        gram: (d, d), B.
        gamma: γ, at least 0. Below float64's resolution of S it acts as its limit γ → 0.

    Raises:
        SingularSystem: γ = 0 and S has no inverse in float64.
        ValueError: shapes that do not fit, values that are not finite, a negative count or γ, not
            more than one sample.
    """
    sums, counts, gram = sums.double(), counts.double(), gram.double()
    d, K = sums.shape if sums.ndim == 2 else (0, 0)
    if not sums.numel() or counts.shape != (K,) or gram.shape != (d, d):
        raise ValueError(
            f"sums {tuple(sums.shape)}, counts {tuple(counts.shape)}, gram {tuple(gram.shape)}: "
            "allowed are (d, K), (K,), (d, d)"
        )
    if not 0 <= gamma < math.inf:
        raise ValueError(f"head.lam={gamma}: allowed are finite numbers from 0")
    if not (counts.isfinite().all() and counts.min() >= 0):
        raise ValueError(f"counts={counts.tolist()}: allowed are finite numbers from 0")
    total = counts.sum()
    if not float(total) > 1:
        raise ValueError(f"counts: sum {float(total):g}; allowed is more than 1 sample")
    A = sums.sum(dim=1)
    mean = A / total
    cross = torch.outer(mean, A)
    S = (gram - cross - cross.T + total * torch.outer(mean, mean)) / (total - 1)
    S = S + gamma * torch.eye(d, dtype=torch.float64, device=S.device)
    # Where |μ| is far above the deviation, S has lost the digits that B and Nμμᵀ share.
    size = gram.diagonal() / (total - 1) + gamma
    present = counts > 0
    means = sums[:, present] / counts[present]
    own = solve(S, means, size, lam=gamma, name="the covariance S", samples=float(total))
    prior = (counts[present] / total).log()
    largest = int(counts[present].argmax())
    level = -0.5 * (means * own).sum(dim=0) + prior
    weight = own[:, largest, None].repeat(1, K)
    bias = (level[largest] + NEVER).repeat(K)
    weight[:, present], bias[present] = own, level
    return weight, bias


def message_bytes(width: int, num_classes: int) -> int:
    """Bytes that a client sends once: packed B, sums and counts; 8·(d(d+1)/2 + dK + K)."""
    return FLOAT64 * (packed_size(width) + width * num_classes + num_classes)
