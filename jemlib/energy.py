"""From a classifier's logits to energies: the one place where the sign convention is stated.

    p(x, y) = exp(-E(x, y)) / Z        E(x, y) = -logits(x)[y]                 Equation (2)
    p(x)    = exp(-E(x)) / Z           E(x)    = -logsumexp_y logits(x)[y]     Equation (1)

Low energy means high probability. A quantity called *energy* anywhere in jemlib has this sign;
`+logsumexp` is never called an energy.
"""

from __future__ import annotations

from torch import Tensor, nn


def energy_from_logits(logits: Tensor, y: Tensor | None = None) -> Tensor:
    """Energies E(x) of logits, or E(x, y) where labels are given.

    logits: (B, K); y: (B,) integer labels or None. Returns (B,), in nats. Equations (1) and (2).
    """
    if y is None:
        return -logits.logsumexp(dim=1)
    return -logits.gather(1, y[:, None]).squeeze(1)


class JEM(nn.Module):
    """A classifier read as a joint energy-based model.

    `backbone` maps x (B, ...) to logits (B, K). Logits leave the model in at least float32, whatever
    precision the backbone computes in, so energies and losses never accumulate in 16 bits.
    """

    def __init__(self, backbone: nn.Module):
        super().__init__()
        self.backbone = backbone

    def logits(self, x: Tensor) -> Tensor:
        """Logits of inputs (B, ...), as (B, K): the negative energies -E(x, y) of all K labels."""
        logits = self.backbone(x)
        return logits.float() if logits.element_size() < 4 else logits

    forward = logits

    def energy(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """E(x), or E(x, y) for labels y (B,), as (B,). Equations (1) and (2)."""
        return energy_from_logits(self.logits(x), y)
