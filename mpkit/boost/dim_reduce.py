"""One training step of which the part inside a PCA subspace is quasi-Newton with a line search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from mpkit.arguments import Count, Index, Inside, Real, Share, check_kind, checked
from mpkit.boost.pca import WeightSnapshots, pca_matrix, prepare_pca, read_pca_rows, row_block, write_pca_files
from mpkit.model.randomness import random_state, set_random_state
from mpkit.optimizers.update import as_before
from mpkit.step import StepContext
from mpkit.step.update import Update, Wrapped

__all__ = [
    "DimReduce", "LineSearch", "WeightSnapshots", "pca_matrix", "prepare_pca", "read_pca_rows", "write_pca_files",
]  # fmt: skip

CURVATURE_FLOOR = 1e-20


class LineSearch(NamedTuple):
    """What the last step saw in the subspace of k components.

    projection: (k,) the gradient's components.  direction: (k,) where the search went.
    rho:        the accepted step size, 0 for none.  accepted: whether there was one.
    losses:     the loss of each trial, in the order tried.
    """

    projection: Tensor
    direction: Tensor
    rho: float
    accepted: bool
    losses: tuple[float, ...]


class DimReduce(nn.Module):
    """Step in the subspace of the principal components of earlier weights; momentum descent outside it.

    With P (k, n) the components, g the gradient, q = P g:

        H <- BFGS update from the last accepted move s and the change of q        (inverse Hessian, k x k)
        d  = -H q;  s = rho' d for the first rho' of 1, rho with  loss(w + P^T s) < loss(w) + sigma q.s
        m <- gamma m + g - P^T q                                                  (what the subspace does not hold)
        w <- w - alpha m + P^T s                                                  (s = 0 when neither was accepted)

    The trials run on the same batch with nothing disturbed: weights, buffers (batch norm statistics) and random
    state are restored, and dropout repeats the mask of the forward pass that gave `loss`. One or two forward passes
    more than a plain step, and one read of a loss on the host for each.

    Args:
        network:       returns the loss of a batch: called with the inputs of a step.
        optimizer:     stays as it is. MindSpore drives plain SGD with learning rate 1, whose step adds the move that
                       is computed here and nothing else; here the move is added to the weights at once.
        weight:        the trained parameters; their order is that of the columns of P.
        pca_mat_local: (rows, n) this rank's rows of P, an array or tensor (see `prepare_pca`).
        n_components:  k, over all ranks.
        rho:           second step size tried (dimensionless, in (0, 1)).
        gamma:         momentum of the residual (dimensionless, in [0, 1)).
        alpha:         learning rate of the residual.
        sigma:         share of the expected decrease that a trial must reach (dimensionless, in (0, 1)).
        rank, rank_size: several ranks hold a block of rows each (`row_block`) and share their parts.
    Edges:   gradients must be finite and unscaled: divide by a loss scale before.
    Raises:  TypeError and ValueError for what does not fit, with what was needed.
    Source:  MindSpore boost.DimReduce. Departures: the loss scale is taken out once, before (there the residual stays
             scaled); losses of several ranks are averaged (there divided as integers); trials disturb nothing.
    """

    @checked
    def __init__(
        self,
        network: nn.Module,
        optimizer: Optimizer,
        weight: Sequence[nn.Parameter],
        pca_mat_local: np.ndarray | Tensor,
        n_components: Count = 32,
        rho: Inside = 0.55,
        gamma: Share = 0.9,
        alpha: Real = 0.001,
        sigma: Inside = 0.4,
        rank: Index = 0,
        rank_size: Count = 1,
        *,
        process_group: Any = None,
    ) -> None:
        super().__init__()
        self.weights = tuple(check_kind("each of weight", w, nn.Parameter, "an nn.Parameter") for w in weight)
        self.block = row_block(n_components, rank, rank_size)
        check_kind("pca_mat_local", pca_mat_local, (np.ndarray, Tensor), "an array or a tensor")
        size, rows = sum(w.numel() for w in self.weights), torch.as_tensor(pca_mat_local)
        if rows.shape != (own := self.block.stop - self.block.start, size):
            need = f"{own} rows ({n_components} components, rank {rank} of {rank_size}) of {size} weights"
            raise ValueError(f"pca_mat_local must have {need}, got {tuple(rows.shape)}")
        self._network = (network,)  # a tuple: the network's state stays out of this module's
        self.rho, self.gamma, self.alpha, self.sigma = rho, gamma, alpha, sigma
        self.rank, self.rank_size, self._group = rank, rank_size, process_group
        like = self.weights[0].new_zeros((), dtype=torch.promote_types(self.weights[0].dtype, torch.float32))
        self.pca: Tensor = nn.Buffer(rows.to(like), persistent=False)
        self.inverse_hessian: Tensor = nn.Buffer(torch.eye(n_components).to(like))
        self.last_projection: Tensor = nn.Buffer(like.new_zeros(n_components))
        self.last_move: Tensor = nn.Buffer(like.new_zeros(n_components))
        self.momentum: Tensor = nn.Buffer(like.new_zeros(size))
        self.search: LineSearch | None = None
        self._random = random_state()
        network.register_forward_pre_hook(self._real)

    @torch.no_grad()
    def forward(
        self,
        loss: Tensor,
        old_grad: Sequence[Tensor],
        weight: Sequence[Tensor] | None = None,
        weight_clone: Sequence[Tensor] | None = None,
        *inputs: object,
    ) -> Tensor:
        """Move the weights by one step; -> the loss given.

        Args:
            loss:         () of `inputs` at the present weights.
            old_grad:     one finite, unscaled gradient per weight.
            weight, weight_clone: as in MindSpore; None is fine, the module knows its weights.
            inputs:       the batch, for the trials.
        """
        gradient = nn.utils.parameters_to_vector(old_grad).to(self.momentum)
        projection = self._gathered(self.pca @ gradient)
        hessian = self._updated(projection)
        direction = -(hessian @ projection)
        move = self._back(direction)
        rho, losses = self._searched(loss, projection @ direction, move, inputs)
        if rho:
            self.inverse_hessian, self.last_projection, self.last_move = hessian, projection, rho * direction
        self.search = LineSearch(projection, direction, rho, rho > 0, losses)
        self.momentum.mul_(self.gamma).add_(gradient - self._back(projection))
        for w, part in zip(self.weights, as_before(rho * move - self.alpha * self.momentum, self.weights)):
            w.add_(part)
        return loss

    def _updated(self, projection: Tensor) -> Tensor:
        """The BFGS update of the inverse Hessian by the last accepted move, if the curvature along it is positive."""
        move, change = self.last_move, projection - self.last_projection
        curvature = change @ move
        keep = torch.eye(len(move)).to(move) - torch.outer(change, move) / curvature
        updated = keep.T @ self.inverse_hessian @ keep + torch.outer(move, move) / curvature
        return torch.where(curvature > CURVATURE_FLOOR, updated, self.inverse_hessian)

    def _searched(self, loss: Tensor, slope: Tensor, move: Tensor, inputs: tuple[Any, ...]) -> tuple[float, tuple]:
        """The first of 1, rho whose loss is low enough (0 for none), and the losses tried."""
        loss, losses = self._mean(loss), []
        for rho in (1.0, self.rho):
            trial = self._mean(self._tried(rho * move, inputs))
            losses.append(trial.item())
            if bool(trial < loss + self.sigma * rho * slope):
                return rho, tuple(losses)
        return 0.0, tuple(losses)

    def _tried(self, move: Tensor, inputs: tuple[Any, ...]) -> Tensor:
        """The loss at moved weights, with the dropout of the last real pass; weights and buffers stay as they are."""
        (network,), kept, drawn = self._network, random_state(), self._random
        moved = {id(w): (w + part).to(w.dtype) for w, part in zip(self.weights, as_before(move, self.weights))}
        parts = {name: moved[id(p)] for name, p in network.named_parameters() if id(p) in moved}
        set_random_state(drawn)
        try:
            return functional_call(network, parts | {n: b.clone() for n, b in network.named_buffers()}, inputs)
        finally:
            set_random_state(kept)
            self._random = drawn

    def _real(self, module: nn.Module, inputs: object) -> None:
        self._random = random_state()

    def _back(self, components: Tensor) -> Tensor:
        """(k,) components -> (n,) P^T components, summed over the ranks."""
        return self._summed(self.pca.T @ components[self.block])

    def _gathered(self, part: Tensor) -> Tensor:
        """This rank's components -> (k,) those of all ranks."""
        whole = torch.zeros_like(self.last_move)
        whole[self.block] = part
        return self._summed(whole)

    def _mean(self, loss: Tensor) -> Tensor:
        return self._summed(loss.detach().to(self.momentum.dtype).reshape(()) / self.rank_size)

    def _summed(self, tensor: Tensor) -> Tensor:
        """A new tensor, summed in place over the ranks."""
        if self.rank_size > 1:
            dist.all_reduce(tensor, group=self._group)
        return tensor


class DimReduceUpdate(Wrapped):
    """The move of a `DimReduce`, which drives the optimizer."""

    what = "dimension reduction"
    refuses: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("accumulation", "freezing", "AdaSum", "dimension reduction"),
        "it computes the whole move itself, and drives plain SGD",
    )

    def __init__(self, inner: Update, dim_reduce: DimReduce) -> None:
        super().__init__(inner)
        self.dim_reduce = dim_reduce

    def apply(self, ctx: StepContext | None, found_inf: Tensor | None) -> None:
        """One move from the loss and the batch of `ctx`. It measures losses, so the flag is read on the host."""
        if found_inf is not None and found_inf.item():
            return
        if ctx is None or ctx.loss is None:
            raise RuntimeError("DimReduce measures losses on the batch of a step: run it through a train cell")
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.dim_reduce.weights]
        self.dim_reduce(ctx.loss, grads, None, None, *ctx.inputs)
