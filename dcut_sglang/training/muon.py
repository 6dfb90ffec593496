"""Muon: momentum, orthogonalised, for weight matrices.

torch.optim.Muon orthogonalises in bfloat16 only, which is an order of magnitude slower on CPUs
without bfloat16 arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

# Quintic Newton-Schulz coefficients (Jordan et al., "Muon", 2024): they drive singular values into
# about 0.7..1.2 in five rounds, which is close enough to one.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_NUM_ROUNDS = 5


def orthogonalize(matrix: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns a matrix with the same singular vectors and singular values near one.

    `dtype` is that of the products; the result has the matrix's own.
    """
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = (wide / (wide.norm() + 1e-7)).to(dtype)
    for _ in range(_NUM_ROUNDS):
        gram = x @ x.T
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return (x if matrix.shape[0] <= matrix.shape[1] else x.T).to(matrix.dtype)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum and orthogonalisation, with updates as large as AdamW's typical ones."""

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float,
        momentum: float = 0.95,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates every matrix that has a gradient."""
        if closure is not None:
            raise ValueError("Muon takes no closure; call backward() before step()")
        for group in self.param_groups:
            momentum = group["momentum"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["average"] = torch.zeros_like(parameter)
                average = state["average"].lerp_(parameter.grad, 1 - momentum)
                update = orthogonalize(parameter.grad.lerp(average, momentum), self._dtype)
                # An orthogonal m x n update has RMS 1/sqrt(max(m, n)); AdamW's is about 0.2.
                scale = 0.2 * max(parameter.shape) ** 0.5
                parameter.add_(update, alpha=-group["lr"] * scale)
