"""One training step of which the part inside a PCA subspace is quasi-Newton with a line search."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from mpkit.arguments import check_count, check_kind, check_number
from mpkit.boost.dim_reduce.pca import row_block
from mpkit.optimizers.arguments import parameters_of
from mpkit.step import StepContext
from mpkit.step.distributed import mean_, rank_and_size
from mpkit.step.update import Update, Wrapped

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


class DimReduceSGD(torch.optim.SGD):
    """The plain SGD with rate 1 that a `DimReduce` drives, and what it is to be made of.

    Args:
        parameters:     the trained parameters of the network, in its order.
        pca_mat_local:  as in `DimReduce`.
        alpha:          learning rate of the residual.
    """

    dim_reduce = True  # MindSpore's mark, by which train cells know it

    def __init__(self, parameters: Sequence[nn.Parameter], pca_mat_local: np.ndarray | Tensor, alpha: float) -> None:
        super().__init__(parameters, lr=1.0)
        self.pca_mat_local, self.dim_reduce_alpha = pca_mat_local, alpha

    def __getstate__(self) -> dict[str, Any]:
        mine = ("pca_mat_local", "dim_reduce_alpha")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in mine}}


DimReduceSGD.__name__ = "SGD"  # what it is to everybody else, and what MindSpore calls it


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
        optimizer:     plain SGD with learning rate 1 over `weight`: the whole move is handed to it as a gradient.
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

    pca: Tensor
    inverse_hessian: Tensor
    last_projection: Tensor
    last_move: Tensor
    momentum: Tensor

    def __init__(
        self,
        network: nn.Module,
        optimizer: Optimizer,
        weight: Sequence[nn.Parameter],
        pca_mat_local: np.ndarray | Tensor,
        n_components: int = 32,
        rho: float = 0.55,
        gamma: float = 0.9,
        alpha: float = 0.001,
        sigma: float = 0.4,
        rank: int = 0,
        rank_size: int = 1,
        *,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        check_kind("network", network, nn.Module, "an nn.Module")
        self.weights = tuple(weight)
        for each in self.weights:
            check_kind("each of weight", each, nn.Parameter, "a parameter")
        self.size = sum(w.numel() for w in self.weights)
        _check_numbers(n_components, rho, gamma, alpha, sigma)
        if check_count("rank", rank, low=0) >= check_count("rank_size", rank_size):
            raise ValueError(f"need 0 <= rank < rank_size, got rank={rank}, rank_size={rank_size}")
        _check_optimizer(optimizer, self.weights)
        self._parts = (network, optimizer)  # a tuple: the network's state stays out of this module's
        self.rho, self.gamma, self.alpha, self.sigma = rho, gamma, alpha, sigma
        self.rank, self.rank_size, self._group = rank, rank_size, process_group
        self.block = row_block(n_components, rank, rank_size)
        if rank_size > 1 and not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(f"rank_size={rank_size} needs torch.distributed.init_process_group first")
        like = self.weights[0].new_zeros((), dtype=torch.promote_types(self.weights[0].dtype, torch.float32))
        self.register_buffer("pca", self._checked_rows(pca_mat_local, n_components).to(like), persistent=False)
        self.register_buffer("inverse_hessian", torch.eye(n_components).to(like))
        for name, size in (("last_projection", n_components), ("last_move", n_components), ("momentum", self.size)):
            self.register_buffer(name, like.new_zeros(size))
        self.search: LineSearch | None = None
        self._random = _RandomState(like.device)
        network.register_forward_pre_hook(self._random)

    def _checked_rows(self, pca_mat_local: np.ndarray | Tensor, n_components: int) -> Tensor:
        """The matrix, if its rows are those of this rank."""
        check_kind("pca_mat_local", pca_mat_local, (np.ndarray, Tensor), "an array or a tensor")
        rows, own = torch.as_tensor(pca_mat_local), self.block.stop - self.block.start
        if rows.shape != (own, self.size):
            raise ValueError(
                f"pca_mat_local must have {own} rows ({n_components} components, rank {self.rank} of "
                f"{self.rank_size}) of {self.size} weights, got {tuple(rows.shape)}"
            )
        return rows

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
        if len(old_grad) != len(self.weights):
            raise ValueError(f"need one gradient for each of {len(self.weights)} weights, got {len(old_grad)}")
        gradient = _flat(old_grad).to(self.momentum)
        projection = self._gathered(self.pca @ gradient)
        hessian = self._updated(projection)
        direction = -(hessian @ projection)
        move = self._back(direction)
        rho, losses = self._searched(loss, projection @ direction, move, inputs)
        if rho:
            self.inverse_hessian, self.last_projection, self.last_move = hessian, projection, rho * direction
        self.search = LineSearch(projection, direction, rho, rho > 0, losses)
        self.momentum.mul_(self.gamma).add_(gradient - self._back(projection))
        self._step(rho * move - self.alpha * self.momentum)
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
        network = self._parts[0]
        before = [w.detach().clone() for w in self.weights]
        loss, losses = self._mean(loss), []
        try:
            for rho in (1.0, self.rho):
                self._set(before, rho * move)
                with _undisturbed(network, self._random):
                    trial = self._mean(cast(Tensor, network(*inputs)))
                losses.append(trial.item())
                if bool(trial < loss + self.sigma * rho * slope):
                    return rho, tuple(losses)
            return 0.0, tuple(losses)
        finally:
            self._set(before, None)

    def _set(self, before: list[Tensor], move: Tensor | None) -> None:
        parts = self._split(move) if move is not None else [torch.zeros(()).to(w) for w in before]
        for w, old, part in zip(self.weights, before, parts):
            w.copy_(old + part)

    def _step(self, move: Tensor) -> None:
        """Give the negative move to the SGD with rate 1; the true gradients are put back."""
        kept = [w.grad for w in self.weights]
        for w, part in zip(self.weights, self._split(-move)):
            w.grad = part.to(w.dtype)
        self._parts[1].step()
        for w, grad in zip(self.weights, kept):
            w.grad = grad

    def _split(self, flat: Tensor) -> list[Tensor]:
        return [p.view_as(w) for p, w in zip(flat.split([w.numel() for w in self.weights]), self.weights)]

    def _back(self, components: Tensor) -> Tensor:
        """(k,) components -> (n,) P^T components, summed over the ranks."""
        part = self.pca.T @ components[self.block]
        if self.rank_size > 1:
            dist.all_reduce(part, group=self._group)
        return part

    def _gathered(self, part: Tensor) -> Tensor:
        """This rank's components -> (k,) those of all ranks."""
        if self.rank_size == 1:
            return part
        k = len(self.last_move)
        padded = part.new_zeros(-(-k // self.rank_size))
        padded[: len(part)] = part
        every = [torch.empty_like(padded) for _ in range(self.rank_size)]
        dist.all_gather(every, padded, group=self._group)
        return torch.cat(every)[:k]

    def _mean(self, loss: Tensor) -> Tensor:
        loss = loss.detach().to(self.momentum.dtype).reshape(())
        if self.rank_size > 1:
            loss = loss.clone()
            mean_([loss], self.rank_size, self._group)
        return loss


class DimReduceUpdate(Wrapped):
    """The move of `DimReduce`, which drives the optimizer."""

    what = "dimension reduction"
    refuses: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("accumulation", "freezing", "AdaSum", "dimension reduction"),
        "it computes the whole move itself, and drives plain SGD",
    )

    def __init__(self, inner: Update, network: nn.Module, hyper: Mapping[str, Any]) -> None:
        super().__init__(inner)
        optimizer: Any = inner.optimizer
        if not hasattr(optimizer, "pca_mat_local"):  # marked by hand
            raise ValueError("an optimizer marked for dim_reduce comes from AutoBoost.network_auto_process_train")
        rank, size = rank_and_size()
        self.dim_reduce = DimReduce(
            network,
            optimizer,
            parameters_of(optimizer),  # type: ignore[arg-type]
            optimizer.pca_mat_local,
            alpha=float(optimizer.dim_reduce_alpha),
            rank=rank,
            rank_size=size,
            **{name: hyper[name] for name in ("n_components", "rho", "gamma", "sigma")},
        )

    def apply(self, ctx: StepContext | None, found_inf: Tensor | None) -> None:
        """One move from the loss and the batch of `ctx`. It measures losses, so the flag is read on the host."""
        if found_inf is not None and found_inf.item():
            return
        if ctx is None or ctx.loss is None:
            raise RuntimeError("DimReduce measures losses on the batch of a step: run it through a train cell")
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.dim_reduce.weights]
        self.dim_reduce(ctx.loss, grads, None, None, *ctx.inputs)


class _RandomState:
    """Remembers the random state before a network's forward pass, so that a trial can repeat its dropout."""

    def __init__(self, device: torch.device) -> None:
        self.devices = [device] if device.type == "cuda" else []
        self.state: list[Tensor] | None = None
        self.frozen = False

    def __call__(self, module: nn.Module, inputs: object) -> None:
        if not self.frozen:
            self.state = [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in self.devices)]

    def restore(self) -> None:
        if self.state is not None:
            torch.set_rng_state(self.state[0])
            for device, state in zip(self.devices, self.state[1:]):
                torch.cuda.set_rng_state(state, device)


@contextmanager
def _undisturbed(network: nn.Module, random: _RandomState) -> Iterator[None]:
    """Run forward passes that leave buffers and random state as they were."""
    buffers = [(b, b.clone()) for b in network.buffers()]
    random.frozen = True
    try:
        with torch.random.fork_rng(random.devices):
            random.restore()
            yield
    finally:
        random.frozen = False
        for buffer, value in buffers:
            buffer.copy_(value)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


def _check_numbers(n_components: int, rho: float, gamma: float, alpha: float, sigma: float) -> None:
    check_count("n_components", n_components)
    for name, value in (("rho", rho), ("sigma", sigma)):
        check_number(name, value, high=1.0, open_low=True)
    check_number("gamma", gamma, high=1.0)
    check_number("alpha", alpha)


def _check_optimizer(optimizer: Optimizer, weights: Sequence[nn.Parameter]) -> None:
    check_kind("optimizer", optimizer, Optimizer, "a torch.optim.Optimizer")
    plain = {"lr": 1.0, "momentum": 0.0, "weight_decay": 0.0}
    for group in optimizer.param_groups:
        found = {key: float(group.get(key, default)) for key, default in plain.items()}
        if found != plain or "betas" in group:
            raise ValueError(
                f"DimReduce computes the whole move and needs plain SGD with lr 1 to apply it, got "
                f"{type(optimizer).__name__} with {found}; the rate of the residual is alpha"
            )
    held = {id(p) for p in parameters_of(optimizer)}
    if {id(w) for w in weights} != held:
        raise ValueError(f"the optimizer must hold exactly the {len(weights)} weights, it holds {len(held)} parameters")
