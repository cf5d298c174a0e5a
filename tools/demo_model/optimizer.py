"""Muon for the matrices inside the layers, AdamW for everything else; both free of host waits.

Learning rates are tensors, so a captured CUDA graph can be replayed while they change.

Source: Muon, https://kellerjordan.github.io/posts/muon/.
"""

# ruff: noqa: PLR2004 (sizes that tell matrices from vectors)
from __future__ import annotations

import torch
from torch import Tensor, nn


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """Bring the singular values of each matrix close to one, [N, R, S] float32."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.transpose(-1, -2) if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.transpose(-1, -2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.transpose(-1, -2) if tall else x


class Optimizer:
    """Both update rules over a model's parameters.

    Args:
        model: Its parameters are updated in place.
        muon_rate, adam_rate: Peak learning rates; `scale` multiplies both.
        weight_decay: Of the matrices, times their learning rate.
    """

    def __init__(
        self, model: nn.Module, *, muon_rate: float, adam_rate: float, weight_decay: float
    ) -> None:
        self.muon_rate, self.adam_rate, self.weight_decay = muon_rate, adam_rate, weight_decay
        groups: dict[tuple[int, ...], list[nn.Parameter]] = {}
        self.adam: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "embed_tokens" not in name and min(parameter.shape) > 8:
                groups.setdefault(tuple(parameter.shape), []).append(parameter)
            else:
                self.adam.append(parameter)
        self.muon = list(groups.values())
        self.momentum = [torch.zeros_like(torch.stack(tuple(g))) for g in self.muon]
        self.first = [torch.zeros_like(p) for p in self.adam]
        self.second = [torch.zeros_like(p) for p in self.adam]
        device = self.adam[0].device
        self.scale = torch.zeros((), device=device)
        self.count = torch.zeros((), device=device)

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter from its gradient."""
        grads = [p.grad for group in self.muon for p in group] + [p.grad for p in self.adam]
        norm = torch.stack(torch._foreach_norm(grads)).norm()  # noqa: SLF001
        clip = (1.0 / (norm + 1e-6)).clamp(max=1.0)
        rate = self.scale * self.muon_rate
        for group, momentum in zip(self.muon, self.momentum, strict=True):
            grad = torch.stack([p.grad for p in group])
            momentum.lerp_(grad, 0.05)
            update = orthogonalize(grad.lerp(momentum, 0.95))
            update = update * max(1.0, group[0].shape[0] / group[0].shape[1]) ** 0.5
            for index, p in enumerate(group):
                p.mul_(1.0 - rate * self.weight_decay).sub_(update[index] * rate)
        self.count += 1.0
        rate = self.scale * self.adam_rate
        bias1, bias2 = 1.0 - 0.9**self.count, 1.0 - 0.98**self.count
        for p, first, second in zip(self.adam, self.first, self.second, strict=True):
            grad = p.grad * clip
            first.lerp_(grad, 0.1)
            second.lerp_(grad * grad, 0.02)
            p.sub_(rate * (first / bias1) / ((second / bias2).sqrt() + 1e-8))
