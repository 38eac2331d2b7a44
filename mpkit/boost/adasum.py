"""AdaSum: merge the updates of several workers so that what they agree on is averaged and the rest is added."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpkit.arguments import checked
from mpkit.optimizers.arguments import parameters_of
from mpkit.step import StepContext
from mpkit.step.distributed import average_, rank_and_size
from mpkit.step.update import Update, Wrapped

__all__ = ["AdaSum", "adasum", "adasum_coefficients", "adasum_enabled", "adasum_pair", "halves"]

EPS_PER_RANK = 1e-12
Shape = tuple[int, ...]


def adasum_coefficients(a: Tensor, b: Tensor, *, eps: float = 2 * EPS_PER_RANK) -> Tensor:
    """The two weights of the pair formula, (2,) in the wide dtype of `adasum_pair`."""
    return _coefficients(_products(a, b), eps)


def adasum_pair(a: Tensor, b: Tensor, *, eps: float = 2 * EPS_PER_RANK) -> Tensor:
    """Merge two updates of one tensor: (1 - d/2A) a + (1 - d/2B) b, d = a.b + eps, A = a.a + eps, B = b.b + eps.

    Shapes:  a, b (*) of one floating dtype -> (*), same dtype.
    Units:   inner products are float64 on a CPU and at least float32 elsewhere, also for half-precision updates.
    Edges:   orthogonal -> a + b; equal -> their mean; opposite -> 0; norms far under sqrt(eps) -> the mean;
             eps=0 gives a zero vector the coefficient 1, as the paper does.
    Source:  Maleki et al. 2020, arXiv:2006.02924, section 3; the epsilon is MindSpore boost.AdaSum's.

    >>> adasum_pair(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))
    tensor([1., 1.])
    >>> adasum_pair(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.0]))
    tensor([1., 0.])
    """
    if a.shape != b.shape:
        raise ValueError(f"AdaSum merges updates of one tensor, got shapes {tuple(a.shape)} and {tuple(b.shape)}")
    return _weighted(a, b, adasum_coefficients(a, b, eps=eps))


def adasum(deltas: Sequence[Sequence[Tensor]], *, eps: float = EPS_PER_RANK) -> list[Tensor]:
    """Merge the updates of 2**m simulated workers on one device, as `AdaSum` does over processes.

    Level s merges the results of workers q and q XOR 2**s with an epsilon of `eps` times the 2**(s+1) workers below.
    A tensor of one element has no direction to adapt to: it becomes the plain mean.

    Shapes:  deltas[worker][tensor] (*) -> one tensor (*) per position, the merged update of every worker.
    Raises:  ValueError unless the number of workers is a power of two and all have the same shapes.

    >>> adasum([[torch.tensor([1.0, 0.0])], [torch.tensor([0.0, 1.0])]])
    [tensor([1., 1.])]
    """
    _levels(len(deltas))
    shapes = [[t.shape for t in delta] for delta in deltas]
    if any(s != shapes[0] for s in shapes):
        raise ValueError("every worker must bring updates of the same shapes, in the same order")
    merged, ranks = [[t.to(_wide_enough(t)) for t in delta] for delta in deltas], 2
    while len(merged) > 1:
        pairs = zip(merged[::2], merged[1::2])
        merged = [[_merged(a, b, ranks * eps) for a, b in zip(*pair)] for pair in pairs]
        ranks *= 2
    return [m.to(d.dtype) for m, d in zip(merged[0], deltas[0])]


def adasum_enabled(world_size: int, device_number: int = 8) -> bool:
    """Whether there is anything to merge: 2, 4, 8, ... whole nodes are in the world (a remainder is not counted)."""
    nodes = world_size // device_number
    return nodes > 1 and nodes & (nodes - 1) == 0


class AdaSum(nn.Module):
    """AdaSum over processes: nodes of `device_number` ranks each; 2**m nodes merge their updates pairwise.

    Inside a node, gradients are averaged and rank i merges the i-th slice of the parameters with the same slot of the
    other nodes, then hands it round. With `device_number=1` every rank is a node and merges everything.

    Either call it with updates, `adasum(delta_weights, parameters, old_parameters)` -> new weights, or let
    `update_(optimizer.step)` do one whole step: average in the node, step, merge, hand round.

    Args:
        rank:            this process (0 .. world - 1).
        device_number:   ranks per node.
        group_number:    number of nodes, a power of two.
        parameter_tuple: the trained parameters, the same on every rank.
        process_group:   a torch.distributed group (gloo for CPU tensors, nccl for CUDA); None: the default one.
        exchange:        "halving" sends n values per rank however many nodes there are; "full" sends n per level and
                         gives bit for bit what `adasum` gives. Both apply the same formula.
        eps:             times the ranks below a level, added to the three inner products.
    Raises:  ValueError for a world that is not device_number x 2**m; RuntimeError without a process group, and torch's
             own when a peer is gone, or silent for longer than the process group waits.
    Edges:   buffers such as batch norm statistics stay local to each rank.
    Source:  MindSpore boost.AdaSum, where part of the code takes 8 for the device number; arXiv:2006.02924.
    """

    @checked
    def __init__(
        self,
        rank: int,
        device_number: int,
        group_number: int,
        parameter_tuple: Sequence[nn.Parameter],
        *,
        process_group: Any = None,
        exchange: Literal["halving", "full"] = "halving",
        eps: float = EPS_PER_RANK,
    ) -> None:
        super().__init__()
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "AdaSum runs over processes: start the script with torchrun and call "
                "torch.distributed.init_process_group('gloo') first; adasum() merges simulated workers in one process"
            )
        self._levels = _levels(group_number)
        self._group = process_group  # None stays None: holding the default group would outlive its destruction
        world, here = dist.get_world_size(self._group), dist.get_rank(self._group)
        if device_number < 1 or device_number * group_number != world or rank != here:
            raise ValueError(
                f"need device_number x group_number = {world} processes and rank {here}, this process's, got "
                f"{device_number} x {group_number} and rank {rank}"
            )
        self.rank, self.device_number, self.group_number = rank, device_number, group_number
        self.node, self._slot = divmod(rank, device_number)
        self.exchange, self.eps, self.weights = exchange, eps, tuple(parameter_tuple)
        self._in_node = [self._global(self.node * device_number + i) for i in range(device_number)]
        alone = device_number == 1
        self._node_group = None if alone else dist.new_group(self._in_node, use_local_synchronization=True)

    def slot(self, index: int) -> slice:
        """The parameters that device `index` of a node merges: len // devices each, the rest to the last."""
        each, last = len(self.weights) // self.device_number, self.device_number - 1
        return slice(index * each, len(self.weights) if index == last else (index + 1) * each)

    @torch.no_grad()
    def forward(
        self, delta_weights: Sequence[Tensor], parameters: Sequence[Tensor], old_parameters: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Merge `delta_weights` (old - new of the local step) over the nodes; -> old_parameters - merged, new tensors.

        The three sequences run in parallel. `parameters` only has to match: mpkit does not write into it.
        """
        counts = len(delta_weights), len(parameters), len(old_parameters)
        if len(set(counts)) != 1:
            raise ValueError(f"need as many deltas as parameters and old parameters, got {counts}")
        dtype = reduce(torch.promote_types, (d.dtype for d in delta_weights), torch.float32)
        whole = [self.exchange == "full" or d.numel() == 1 for d in delta_weights]
        flats = [d.to(dtype).reshape(-1) for d in delta_weights]
        merged = iter(self._merged([flat for flat, is_whole in zip(flats, whole) if is_whole]))
        halved = [(flat, tuple(d.shape)) for flat, d, is_whole in zip(flats, delta_weights, whole) if not is_whole]
        joined = iter(self._merged_halves(*map(list, zip(*halved)))) if halved else iter(())
        results = [next(merged if is_whole else joined) for is_whole in whole]
        return tuple((old - r.reshape(old.shape)).to(old.dtype) for old, r in zip(old_parameters, results))

    def update_(self, step: Callable[[], Any]) -> None:
        """One step of the parameters in place: gradients averaged in the node, `step()`, merge, hand round."""
        if self._node_group is not None:
            average_(self.weights, self._node_group)
        weights = [p.detach() for p in self.weights]
        old = [w.clone() for w in weights]
        step()
        mine = self.slot(self._slot)
        deltas = [o - w for o, w in zip(old[mine], weights[mine])]
        for w, new in zip(weights[mine], self(deltas, weights[mine], old[mine])):
            w.copy_(new)
        for index, source in enumerate(self._in_node if self._node_group is not None else ()):
            for weight in weights[self.slot(index)]:
                dist.broadcast(weight, source, self._node_group)

    def _merged(self, flats: list[Tensor]) -> list[Tensor]:
        """Whole flat tensors -> their AdaSum over all nodes, level by level."""
        for level in range(self._levels if flats else 0):
            a, b = self._ordered(flats, self._swapped(flats, [len(f) for f in flats], level), level)
            flats = [_merged(x, y, self.eps * 2 ** (level + 1)) for x, y in zip(a, b)]
        return flats

    def _merged_halves(self, flats: Sequence[Tensor], shapes: list[Shape]) -> Sequence[Tensor]:
        """Each level keeps half of what a rank holds (the lower partner the right half), the way back joins them.

        A level's products are summed over the 2**(level+1) ranks that hold the two merged vectors between them, so
        every rank weighs with the full ones.
        """
        sent: list[list[int]] = []
        for level in range(self._levels):
            cuts = [halves(shape) for shape in shapes]
            shapes = [right if self._is_lower(level) else left for left, right in cuts]
            parts = [flat.split([math.prod(left), math.prod(right)]) for flat, (left, right) in zip(flats, cuts)]
            send, keep = zip(*(pair if self._is_lower(level) else pair[::-1] for pair in parts))
            a, b = self._ordered(keep, self._swapped(send, [len(k) for k in keep], level), level)
            products = torch.stack([_products(x, y) for x, y in zip(a, b)])
            for below in range(level + 1):
                products = products + self._swapped([products], [products.numel()], below)[0].view_as(products)
            eps = self.eps * 2 ** (level + 1)
            flats = [_weighted(x, y, _coefficients(p, eps)) for x, y, p in zip(a, b, products)]
            sent.append([len(part) for part in send])
        for level in reversed(range(self._levels)):
            pairs = zip(*self._ordered(self._swapped(flats, sent[level], level), flats, level))
            flats = [torch.cat(pair) for pair in pairs]  # the lower partner has the right half
        return flats

    def _is_lower(self, level: int) -> bool:
        return not self.node & (1 << level)

    def _ordered(self, own: Sequence[Tensor], theirs: Sequence[Tensor], level: int) -> tuple[Sequence[Tensor], ...]:
        """The lower partner's first, so that both ranks compute the same rounding."""
        return (own, theirs) if self._is_lower(level) else (theirs, own)

    def _swapped(self, tensors: Sequence[Tensor], sizes: list[int], level: int) -> Sequence[Tensor]:
        """Send `tensors` to the partner of this level and receive flat ones of `sizes` from it."""
        other = (self.node ^ (1 << level)) * self.device_number + self._slot
        outgoing = torch.cat([t.reshape(-1) for t in tensors])
        incoming = outgoing.new_empty(sum(sizes))
        ends = ((dist.isend, outgoing), (dist.irecv, incoming))
        todo = [dist.P2POp(end, t, self._global(other), self._group) for end, t in ends if len(t)]
        for work in dist.batch_isend_irecv(todo) if todo else ():
            work.wait()
        return incoming.split(sizes)

    def _global(self, rank: int) -> int:
        return rank if self._group is None else dist.get_global_rank(self._group, rank)


class AdaSumUpdate(Wrapped):
    """The updates of all nodes are merged, so the gradients are not averaged before."""

    what = "AdaSum"
    refuses: ClassVar[Mapping[str, str]] = {
        "AdaSum": "the updates are merged already",
        "dimension reduction": "its steps have one size for all processes already",
    }

    def __init__(self, inner: Update, device_number: int) -> None:
        super().__init__(inner)
        rank, world = rank_and_size()
        trained: Any = tuple(parameters_of(inner.optimizer))
        self.adasum = AdaSum(rank, device_number, world // device_number, trained)

    def reduce(self) -> None:
        """Nothing: AdaSum averages in the node and merges between nodes."""

    def apply(self, ctx: StepContext | None, found_inf: Tensor | None) -> None:
        """One update, merged. It talks to peers, so the flag is read on the host."""
        if found_inf is not None and found_inf.item():
            self.inner.apply(ctx, found_inf)
        else:
            self.adasum.update_(lambda: self.inner.apply(ctx, None))


def halves(shape: Shape) -> tuple[Shape, Shape]:
    """Where a tensor is halved: along its first axis longer than 1, the odd row to the right.

    >>> halves((1, 9))
    ((1, 4), (1, 5))
    """
    axis = next((i for i, length in enumerate(shape) if length > 1), None)
    if axis is None:  # one element is left: it goes to the right
        return (0,), shape
    left = shape[axis] // 2
    return (*shape[:axis], left, *shape[axis + 1 :]), (*shape[:axis], shape[axis] - left, *shape[axis + 1 :])


def _levels(workers: int) -> int:
    """m for 2**m workers."""
    if workers < 1 or workers & (workers - 1):
        raise ValueError(
            f"AdaSum merges pairwise and needs 1, 2, 4, 8, ... workers, got {workers}; leave some out, or average "
            "the gradients of two workers first and count them as one"
        )
    return workers.bit_length() - 1


def _wide_enough(x: Tensor) -> torch.dtype:
    """The dtype in which updates are added: at least float32."""
    return torch.promote_types(x.dtype, torch.float32)


def _products(a: Tensor, b: Tensor) -> Tensor:
    """(3,): a.b, a.a, b.b, in float64 on a CPU."""
    wide = torch.float64 if a.device.type == "cpu" else _wide_enough(a)
    x, y = a.reshape(-1).to(wide), b.reshape(-1).to(wide)
    return torch.stack([x @ y, x @ x, y @ y])


def _coefficients(products: Tensor, eps: float) -> Tensor:
    """(3,) a.b, a.a, b.b -> (2,) the weights of a and of b; 1 for a vector whose square is 0."""
    dot, squares = products[0] + eps, products[1:] + eps
    return 1 - torch.where(squares > 0, dot / (2 * squares), 0.0)


def _weighted(a: Tensor, b: Tensor, coefficients: Tensor) -> Tensor:
    dtype = _wide_enough(a)
    weight_a, weight_b = coefficients.to(dtype)
    return (weight_a * a.to(dtype) + weight_b * b.to(dtype)).to(a.dtype)


def _merged(a: Tensor, b: Tensor, eps: float) -> Tensor:
    """The pair formula at a level whose epsilon is `eps`; the mean for one element."""
    if a.numel() == 1:
        return (a + b) / 2
    return _weighted(a, b, _coefficients(_products(a, b), eps))
