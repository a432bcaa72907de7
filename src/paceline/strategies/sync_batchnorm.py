"""Batch-norm over the global batch: sums statistics and their gradients over ranks (torch's version needs GPUs)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from paceline.comm.base import Comm
from paceline.models.properties import BATCH_NORMS


class _Normalise(torch.autograd.Function):
    """(x - mean) / std, with mean and std over the samples of all ranks; a rank may have none."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, comm: Comm, samples: int
    ) -> tuple[Tensor, Tensor, Tensor, float]:
        channels = x.shape[1]
        count = x.numel() // channels if samples else 0
        axes = [0, *range(2, x.dim())]
        table = x.new_zeros(comm.size, 2 * channels + 1)
        if count:
            var, mean = torch.var_mean(x, axes, correction=0)
            table[comm.rank] = torch.cat([mean, var, x.new_tensor([count])])
        comm.allreduce(table.view(-1))
        counts = table[:, -1:]
        total = counts.sum()
        means, variances = table[:, :channels], table[:, channels:-1]
        mean = (means * counts).sum(0) / total
        # Chan et al.'s sum of squares, which avoids differences of large numbers.
        var = ((variances + (means - mean).square()) * counts).sum(0) / total
        inverse = (var + eps).rsqrt()
        wide = [1, channels, *[1] * (x.dim() - 2)]
        normal = (x - mean.view(wide)) * inverse.view(wide)
        ctx.save_for_backward(normal, weight, inverse)
        ctx.comm, ctx.axes, ctx.wide, ctx.count, ctx.total = comm, axes, wide, count, float(total)
        ctx.set_materialize_grads(False)
        return normal * weight.view(wide) + bias.view(wide), mean, var, float(total)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor, *_: Any) -> Any:
        context: Any = ctx
        normal, weight, inverse = context.saved_tensors
        wide, axes = context.wide, context.axes
        bias_grad = grad.sum(axes)
        weight_grad = (grad * normal).sum(axes)
        sums = torch.cat([bias_grad, weight_grad])
        context.comm.allreduce(sums)
        mean_grad, mean_grad_normal = (sums / context.total).view(2, *wide)
        # Samples that do not count have not made the mean, and have no gradient.
        x_grad = (
            torch.zeros_like(grad)
            if not context.count
            else (grad - mean_grad - normal * mean_grad_normal) * (weight * inverse).view(wide)
        )
        return x_grad, weight_grad, bias_grad, None, None, None


class SyncBatchNorm(nn.SyncBatchNorm):
    """A BatchNorm layer with statistics over the samples of all ranks; see `synchronise_batchnorm`."""

    comm: Comm
    counted = 0  # samples of this rank in the last batch
    idle = False  # whether this rank's samples do not count

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            own = self.running_mean is None  # evaluation never communicates: ranks may have unequal numbers of batches
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, own, 0.0, self.eps)
        self.counted = 0 if self.idle else len(x)
        ones = torch.ones(x.shape[1], dtype=x.dtype, device=x.device)
        weight = ones if self.weight is None else self.weight
        bias = torch.zeros_like(ones) if self.bias is None else self.bias
        out, mean, var, total = _Normalise.apply(  # type: ignore[no-untyped-call]
            x, weight, bias, self.eps, self.comm, self.counted
        )
        self._track(mean.detach(), var.detach() * (total / max(total - 1, 1)))
        result: Tensor = out
        return result

    def _track(self, mean: Tensor, var: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked += 1
        rate = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean, rate)
        self.running_var.lerp_(var, rate)


def synchronise_batchnorm(model: nn.Module, comm: Comm) -> nn.Module:
    """Make every batch-norm layer of the model a synchronised one, in place, so that references to it stay valid."""
    own = comm.dup() if comm.size > 1 else comm
    for layer in model.modules():
        if isinstance(layer, (*BATCH_NORMS, SyncBatchNorm)):
            layer.__class__ = SyncBatchNorm
            assert isinstance(layer, SyncBatchNorm)
            layer.comm = own
    return model


def synchronised_layers(model: nn.Module) -> list[SyncBatchNorm]:
    return [layer for layer in model.modules() if isinstance(layer, SyncBatchNorm)]
