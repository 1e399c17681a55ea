"""Estimators of KL(policy || reference), per token, in nats. All are written on delta = logp_ref - logp.

Estimators k1, k2, k3: J. Schulman, "Approximating KL divergence" (http://joschu.net/blog/kl-approx.html).
"""

from typing import Literal

import torch
from torch import Tensor

Estimator = Literal["k1", "k2", "k3", "exact"]

MAX_DELTA = 20.0
"""Above this log-ratio (e^20 = 4.9e8) an exponential is continued by its tangent, so that value and gradient stay
finite."""


def bounded_expm1(x: Tensor) -> Tensor:
    """e^x - 1 for x <= MAX_DELTA, its tangent above: finite, increasing, and with a gradient of the right sign.

    The bound sits before the exponential: clamping its result would leave inf * 0 = NaN in the backward pass.
    """
    inside = x.clamp(max=MAX_DELTA)
    return torch.expm1(inside) + torch.exp(inside) * (x - inside)


def sampled_kl(logps: Tensor, reference_logps: Tensor, estimator: Estimator) -> Tensor:
    """KL estimate of each sampled token, same shape as ``logps``; differentiable in ``logps``.

    k1 = -delta; k2 = delta^2 / 2; k3 = e^delta - 1 - delta, by expm1, since e^d - d - 1 cancels to +-1e-7 near 0.
    """
    delta = reference_logps - logps
    if estimator == "k1":
        return -delta
    if estimator == "k2":
        return 0.5 * delta.square()
    if estimator == "k3":
        return bounded_expm1(delta) - delta
    raise ValueError(f"{estimator!r} is no estimator on sampled tokens")


def weigh_by_ratio(kl: Tensor, ratio: Tensor, estimator: Estimator) -> Tensor:
    """The same estimate for tokens sampled by an older policy: E_old[ratio * k] = E_new[k].

    Each weight makes the expected *gradient* that of KL(policy || reference): k3 needs the derivative through the
    ratio (DeepSeek-V3.2, arXiv 2512.02556, "unbiased KL estimate"), k2 must not have it (its own derivative is the
    right one, arXiv 2510.01555). ``exact`` sums over the vocabulary: the sampled token's ratio has no part in it.
    """
    if estimator == "exact":
        return kl
    return kl * (ratio.detach() if estimator == "k2" else ratio)
