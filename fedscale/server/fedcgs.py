"""FedCGS: a Gaussian classifier from class sums and one shared covariance, in one round.

Guan et al. 2024, Capture Global Feature Statistics for One-Shot Federated Learning.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedscale.server.analytic import solve


def head(sums: Tensor, counts: Tensor, gram: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """Return the linear head (d, K), (K,) of the Gaussian classifier with class means.

    μ = A/N, S = (B − μA' − Aμ' + Nμμ')/(N − 1) + γI, W_c = S⁻¹μ_c, b_c = −½ μ_c'S⁻¹μ_c +
    log(N_c/N), with A = Σ f (all columns of `sums`), B = Σ f f'. S is the covariance of all
    features around their common mean, as the paper has it, so this is LDA where the classes' means
    explain little of it. A class without samples is never predicted.

    Args:
        sums: (d, K) sums of features per class.
        counts: (K,) samples per class; means over a network may make them fractional.
        gram: (d, d), B.
        gamma: γ, at least 0.

    Raises:
        SingularSystem: S has no inverse.
        ValueError: shapes that do not fit, a negative γ, fewer than 2 samples.
    """
    sums, counts, gram = sums.double(), counts.double(), gram.double()
    d, K = sums.shape
    if gram.shape != (d, d) or counts.shape != (K,):
        raise ValueError(
            f"sums {tuple(sums.shape)}, counts {tuple(counts.shape)}, gram {tuple(gram.shape)}: "
            "allowed are (d, K), (K,), (d, d)"
        )
    if not gamma >= 0:
        raise ValueError(f"head.lam={gamma}: allowed: 0 or more")
    total = counts.sum()
    if not float(total) > 1:
        raise ValueError(f"counts sum to {float(total):g}: a covariance needs at least 2 samples")
    everything = sums.sum(1)
    mean = everything / total
    cross = torch.outer(mean, everything)
    covariance = (gram - cross - cross.T + total * torch.outer(mean, mean)) / (total - 1)
    covariance = covariance + gamma * torch.eye(d, dtype=torch.float64)
    present = counts > 1e-9
    means = torch.where(present, sums / counts.clamp(min=1e-9), 0.0)
    weight = solve(covariance, means, f"head.lam={gamma:g}", log_as="the covariance S")
    # A class without samples has W_c = 0 and b_c = log 1e-300, which is finite.
    return weight, -0.5 * (means * weight).sum(0) + (counts / total).clamp(min=1e-300).log()
