"""AdaSum: merge the updates of several workers so that what they agree on is averaged and the rest is added."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from mpkit.arguments import checked
from mpkit.optimizers.arguments import parameters_of
from mpkit.step import StepContext
from mpkit.step.distributed import average_, rank_and_size
from mpkit.step.update import Update, Wrapped

__all__ = ["AdaSum", "adasum", "adasum_coefficients", "adasum_enabled", "adasum_pair", "halves"]

EPS_PER_RANK = 1e-12


def adasum_coefficients(a: Tensor, b: Tensor, *, eps: float = 2 * EPS_PER_RANK) -> Tensor:
    """The two weights of the pair formula, (2,) in the wide dtype of `adasum_pair`."""
    return _coefficients(_products(a.flatten(), b.flatten()), eps)


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
    return _weighted(a.reshape(-1), b.reshape(-1), adasum_coefficients(a, b, eps=eps)).view_as(a)


def adasum(deltas: Sequence[Sequence[Tensor]], *, eps: float = EPS_PER_RANK) -> list[Tensor]:
    """Merge the updates of 2**m simulated workers on one device, as `AdaSum` does over processes.

    Level s merges the results of workers q and q XOR 2**s with an epsilon of `eps` times the 2**(s+1) workers below.
    A tensor of one element has no direction to adapt to: it becomes the plain mean.

    Shapes:  deltas[worker][tensor] (*) -> one tensor (*) per position, the merged update of every worker.
    Raises:  ValueError unless the number of workers is a power of two and all bring as many updates.

    >>> adasum([[torch.tensor([1.0, 0.0])], [torch.tensor([0.0, 1.0])]])
    [tensor([1., 1.])]
    """
    _need_power_of_two(len(deltas))
    rows = [torch.stack([_wide(t).reshape(-1) for t in tensors]) for tensors in zip(*deltas, strict=True)]
    merged = _merged(rows, [t.numel() for t in deltas[0]], eps)
    return [m.view_as(t).to(t.dtype) for m, t in zip(merged, deltas[0])]


def _merged(
    rows: Sequence[Tensor], sizes: Sequence[int], eps: float, add_up: Callable[[Tensor], object] = lambda products: None
) -> list[Tensor]:
    """AdaSum level by level: for each tensor a (workers, values) -> (values,).

    sizes:   how many values the whole tensors have; one alone has no direction, and becomes the mean.
    add_up:  where `rows` are shares of the tensors: adds the inner products of all processes, in place.
    """
    ranks = 2
    while rows and len(rows[0]) > 1:
        pairs = [(row[::2], row[1::2]) for row in rows]
        products = torch.stack([_products(a, b) for a, b in pairs])
        add_up(products)
        rows = [
            (a + b) / 2 if size == 1 else _weighted(a, b, _coefficients(three, ranks * eps))
            for (a, b), three, size in zip(pairs, products, sizes)
        ]
        ranks *= 2
    return [row[0] for row in rows]


def _wide(x: Tensor) -> Tensor:
    """`x` in the dtype in which updates are added: at least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _products(a: Tensor, b: Tensor) -> Tensor:
    """Rows (*, n) -> (3, *): a.b, a.a, b.b, in float64 on a CPU."""
    x, y = (v.double() if v.device.type == "cpu" else _wide(v) for v in (a, b))
    return torch.stack([torch.linalg.vecdot(u, v) for u, v in ((x, y), (x, x), (y, y))])


def _coefficients(products: Tensor, eps: float) -> Tensor:
    """(3, *) a.b, a.a, b.b -> (2, *) the weights of a and of b; 1 for a vector whose square is 0."""
    dot, squares = products[0] + eps, products[1:] + eps
    return 1 - torch.where(squares > 0, dot / (2 * squares), 0.0)


def _weighted(a: Tensor, b: Tensor, coefficients: Tensor) -> Tensor:
    """Rows (*, n), with weights (2, *) -> (*, n) their weighted sums."""
    x, y = _wide(a), _wide(b)
    weight_a, weight_b = coefficients.to(x.dtype)[..., None]
    return (weight_a * x + weight_b * y).to(a.dtype)


def adasum_enabled(world_size: int, device_number: int = 8) -> bool:
    """Whether there is anything to merge: 2, 4, 8, ... whole nodes are in the world (a remainder is not counted)."""
    nodes = world_size // device_number
    return nodes > 1 and nodes & (nodes - 1) == 0


def halves(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where MindSpore halves a tensor: along its first axis longer than 1, the odd row to the right.

    >>> halves((1, 9))
    ((1, 4), (1, 5))
    """
    axis = next(i for i, length in enumerate(shape) if length > 1)
    left = shape[axis] // 2
    return (*shape[:axis], left, *shape[axis + 1 :]), (*shape[:axis], shape[axis] - left, *shape[axis + 1 :])


def _need_power_of_two(workers: int) -> None:
    if workers < 1 or workers & (workers - 1):
        raise ValueError(
            f"AdaSum merges pairwise and needs 1, 2, 4, 8, ... workers, got {workers}; leave some out, or average "
            "the gradients of two workers first and count them as one"
        )


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
        exchange:        "halving": each node merges its share of every tensor and gets the others back, so that a rank
                         sends and holds 2n values however many nodes there are; "full": each rank gets the updates of
                         all and gives bit for bit what `adasum` gives. Both apply the same formula.
        eps:             times the ranks below a level, added to the three inner products.
    Raises:  ValueError for a world that is not device_number x 2**m, and for parameters of other shapes in another
             process; RuntimeError without a process group, and torch's own when a peer is gone, or silent for longer
             than the process group waits.
    Edges:   buffers such as batch norm statistics stay local to each rank.
    Source:  MindSpore boost.AdaSum, which halves vector by vector between partners, with the same result, and where
             part of the code takes 8 for the device number; arXiv:2006.02924.
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
        if not dist.is_initialized():
            raise RuntimeError("start processes with torchrun and call init_process_group first; one process: adasum()")
        world, here = dist.get_world_size(process_group), dist.get_rank(process_group)
        _need_power_of_two(group_number)
        if device_number < 1 or device_number * group_number != world or rank != here:
            need = f"device_number x group_number = {world} processes and rank {here}, this process's"
            raise ValueError(f"need {need}, got {device_number} x {group_number} and rank {rank}")
        self.rank, self.device_number, self.group_number = rank, device_number, group_number
        self.exchange, self.eps, self.weights = exchange, eps, tuple(parameter_tuple)
        every: list[Any] = [None] * world
        dist.all_gather_object(every, [tuple(p.shape) for p in self.weights], process_group)
        if any(shapes != every[0] for shapes in every):
            raise ValueError(f"each process needs the same parameters, in the same order; their shapes are {every}")
        # None stays None: holding the default group would outlive its destruction
        self._node, self._nodes, self._in_node = None, process_group, [rank]
        if device_number > 1:
            ranks = [r if process_group is None else dist.get_global_rank(process_group, r) for r in range(world)]
            first = rank - rank % device_number
            self._in_node = ranks[first : first + device_number]
            same_slot = ranks[rank % device_number :: device_number]
            groups = (dist.new_group(part, use_local_synchronization=True) for part in (self._in_node, same_slot))
            self._node, self._nodes = groups

    def slot(self, index: int) -> slice:
        """The parameters that device `index` of a node merges: len // devices each, the rest to the last."""
        each, last = len(self.weights) // self.device_number, self.device_number - 1
        return slice(index * each, len(self.weights) if index == last else (index + 1) * each)

    @torch.no_grad()
    def forward(
        self, delta_weights: Sequence[Tensor], parameters: Sequence[Tensor], old_parameters: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Merge `delta_weights` (old - new of the local step) over the nodes; -> old_parameters - merged, new tensors.

        `delta_weights` and `old_parameters` run in parallel; `parameters` is MindSpore's, and not needed.
        """
        if not delta_weights:
            return ()
        dtype = reduce(torch.promote_types, (d.dtype for d in delta_weights), torch.float32)
        flats = [d.to(dtype).reshape(-1) for d in delta_weights]
        sizes, nodes = [len(flat) for flat in flats], self.group_number
        if self.exchange == "full":
            merged = _merged(self._gathered(flats).split(sizes, 1), sizes, self.eps)
        else:
            widths = [-(-size // nodes) for size in sizes]
            # a row for each node; the zeros that fill the last one up change no product
            shares = [F.pad(f, (0, w * nodes - len(f))).view(nodes, w) for f, w in zip(flats, widths)]
            rows = torch.empty_like(sent := torch.cat(shares, 1))
            dist.all_to_all_single(rows, sent, group=self._nodes)
            mine = _merged(
                rows.split(widths, 1), sizes, self.eps, lambda all_: dist.all_reduce(all_, group=self._nodes)
            )
            merged = [whole.flatten()[:size] for whole, size in zip(self._gathered(mine).split(widths, 1), sizes)]
        pairs = zip(old_parameters, merged, strict=True)
        return tuple((old - new.view_as(old)).to(old.dtype) for old, new in pairs)

    def _gathered(self, flats: list[Tensor]) -> Tensor:
        """(nodes, values): the tensors of each node side by side."""
        own = torch.cat(flats)
        every = [torch.empty_like(own) for _ in range(self.group_number)]
        dist.all_gather(every, own, group=self._nodes)
        return torch.stack(every)

    def update_(self, step: Callable[[], Any]) -> None:
        """One step of the parameters in place: gradients averaged in the node, `step()`, merge, hand round."""
        if self._node is not None:
            average_(self.weights, self._node)
        weights = [p.detach() for p in self.weights]
        old = [w.clone() for w in weights]
        step()
        mine = self.slot(self.rank % self.device_number)
        deltas = [o - w for o, w in zip(old[mine], weights[mine])]
        for w, new in zip(weights[mine], self(deltas, weights[mine], old[mine])):
            w.copy_(new)
        for index, source in enumerate(self._in_node if self._node is not None else ()):
            for weight in weights[self.slot(index)]:
                dist.broadcast(weight, source, self._node)


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
