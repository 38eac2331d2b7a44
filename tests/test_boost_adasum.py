"""AdaSum over simulated workers: limits of the pair formula, the tree, and what enters it."""

from __future__ import annotations

import itertools
import math
import queue
import threading
from collections import defaultdict
from datetime import timedelta
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_boost_distributed import SHAPES, TIMEOUT, deltas_of, merge, train, weights
from torch import Tensor, nn

from mpkit.boost import adasum as module
from mpkit.boost.adasum import AdaSum, adasum, adasum_coefficients, adasum_enabled, adasum_pair, halves
from mpkit.step import distributed


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def exact_pair(a: Tensor, b: Tensor) -> list[Fraction]:
    """The formula without epsilon in rational arithmetic."""
    x, y = ([Fraction(v) for v in t.flatten().tolist()] for t in (a, b))
    dot, aa, bb = (sum(p * q for p, q in zip(u, v)) for u, v in ((x, y), (x, x), (y, y)))
    return [(1 - dot / (2 * aa)) * p + (1 - dot / (2 * bb)) * q for p, q in zip(x, y)]


@pytest.mark.parametrize("seed", range(5))
def test_the_pair_equals_exact_arithmetic(seed: int) -> None:
    a, b = random(4, 3, seed=seed), random(4, 3, seed=100 + seed)
    want = torch.tensor([float(v) for v in exact_pair(a, b)], dtype=torch.float64).view(4, 3)
    torch.testing.assert_close(adasum_pair(a, b, eps=0.0), want, rtol=1e-14, atol=1e-14)


def test_limits_orthogonal_equal_scaled_and_opposite() -> None:
    a, b = torch.tensor([2.0, 0.0]), torch.tensor([0.0, 3.0])
    assert adasum_pair(a, b, eps=0).tolist() == [2.0, 3.0]
    assert adasum_pair(a, a, eps=0).tolist() == [2.0, 0.0]
    assert adasum_pair(a, 3 * a, eps=0).tolist() == [4.0, 0.0]  # -1/2 a + 5/6 * 3a = 2a
    assert adasum_coefficients(a, 3 * a, eps=0).tolist() == pytest.approx([-0.5, 5 / 6])
    assert adasum_pair(a, -a, eps=0).tolist() == [0.0, 0.0]
    assert adasum_coefficients(a, -a, eps=0).tolist() == [1.5, 1.5]


def test_zero_and_tiny_vectors() -> None:
    a, zero = torch.tensor([2.0, 1.0]), torch.zeros(2)
    assert adasum_pair(a, zero, eps=0).tolist() == [2.0, 1.0]
    assert adasum_pair(zero, zero, eps=0).tolist() == [0.0, 0.0]
    tiny = torch.tensor([1e-9, -1e-9])
    torch.testing.assert_close(adasum_pair(tiny, zero), tiny / 2)  # the epsilon dominates: the mean


def test_the_pair_is_symmetric_and_scales_with_its_inputs() -> None:
    a, b = random(50, seed=1), random(50, seed=2)
    assert torch.equal(adasum_pair(a, b), adasum_pair(b, a))
    torch.testing.assert_close(adasum_pair(8 * a, 8 * b, eps=0), 8 * adasum_pair(a, b, eps=0), rtol=1e-14, atol=0)


def test_half_precision_updates_get_wide_inner_products() -> None:
    # 300 * 300 > 65504: in float16 the products would be inf and the result nan
    a = torch.tensor([300.0, 0.0], dtype=torch.float16)
    merged = adasum_pair(a, a)
    assert merged.dtype == torch.float16
    assert merged.tolist() == [300.0, 0.0]


@pytest.mark.parametrize("workers", [1, 2, 4, 8, 16])
def test_the_tree_is_the_pair_formula_level_by_level(workers: int) -> None:
    deltas = [[random(3, 4, seed=r), random(7, seed=100 + r)] for r in range(workers)]
    for i, merged in enumerate(adasum(deltas, eps=0.0)):
        level = [d[i] for d in deltas]
        while len(level) > 1:
            level = [adasum_pair(a, b, eps=0.0) for a, b in zip(level[::2], level[1::2])]
        torch.testing.assert_close(merged, level[0], rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("workers", [2, 8])
def test_workers_that_agree_give_their_update_and_orthogonal_ones_their_sum(workers: int) -> None:
    same = random(6)
    torch.testing.assert_close(adasum([[same]] * workers)[0], same, rtol=1e-10, atol=1e-10)
    axes = torch.eye(16, dtype=torch.float64)[:workers]
    torch.testing.assert_close(adasum([[axis] for axis in axes])[0], axes.sum(0), rtol=1e-10, atol=1e-10)


def test_one_element_becomes_the_plain_mean() -> None:
    deltas = [[torch.tensor([float(r)]), torch.tensor(float(r))] for r in range(4)]
    assert [m.flatten().tolist() for m in adasum(deltas)] == [[1.5], [1.5]]


@pytest.mark.parametrize("workers", [0, 3, 6, 12])
def test_other_numbers_of_workers_are_refused(workers: int) -> None:
    with pytest.raises(ValueError, match=f"1, 2, 4, 8, ... workers, got {workers}"):
        adasum([[torch.ones(2)]] * workers)


def test_different_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="same shapes"):
        adasum([[torch.ones(2)], [torch.ones(3)]])
    with pytest.raises(ValueError, match=r"got shapes \(2,\) and \(3,\)"):
        adasum_pair(torch.ones(2), torch.ones(3))


@pytest.mark.parametrize("shape", [(7,), (1, 9), (1, 1, 2), (4, 3), (2, 8, 3)])
def test_halves_put_the_whole_together_again(shape: tuple[int, ...]) -> None:
    left, right = halves(shape)
    assert math.prod(left) + math.prod(right) == math.prod(shape)
    flat = torch.arange(math.prod(shape))
    axis = next(i for i, n in enumerate(shape) if n > 1)
    joined = torch.cat([flat[: math.prod(left)].view(left), flat[math.prod(left) :].view(right)], axis)
    assert torch.equal(joined, flat.view(shape))


def test_nodes_of_another_size_than_eight_can_be_asked_for() -> None:
    assert [world for world in range(1, 20) if adasum_enabled(world, 2)] == [4, 5, 8, 9, 16, 17]
    assert adasum_enabled(2, 1)
    assert not adasum_enabled(2)


def test_the_class_says_how_to_start_processes() -> None:
    with pytest.raises(RuntimeError, match="start the script with torchrun"):
        AdaSum(0, 1, 2, [nn.Parameter(torch.zeros(1))])


@pytest.mark.gpu
def test_the_gpu_merges_like_the_cpu() -> None:
    deltas = [[random(64, 33, seed=r).float(), random(7, seed=50 + r).float()] for r in range(8)]
    for got, want in zip(adasum([[t.cuda() for t in d] for d in deltas]), adasum(deltas)):
        torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=1e-5)


def test_devices_of_a_node_share_the_parameters_and_the_last_takes_the_rest() -> None:
    cell = AdaSum.__new__(AdaSum)
    vars(cell).update(weights=[torch.zeros(1)] * 5, device_number=2)
    assert [cell.slot(0), cell.slot(1)] == [slice(0, 2), slice(2, 5)]


def test_single_elements_are_averaged_pair_by_pair() -> None:
    cell = AdaSum.__new__(AdaSum)
    vars(cell).update(_levels=2, _swap=lambda values, _, level: [v + 4.0 * (level + 1) for v in values])
    assert [v.tolist() for v in cell._mean([torch.tensor([1.0]), torch.tensor([-6.0])])] == [[7.0], [0.0]]  # +2, +4
    assert cell._mean([]) == []


# --- the exchange, with a thread for each rank in place of a process


class Wires:
    """What AdaSum uses of torch.distributed, between threads: a queue for each pair of ranks."""

    def __init__(self, world: int, backend: str = "gloo") -> None:
        self.world, self.backend = world, backend
        self.me = threading.local()
        # all made before a rank asks: two that ask a defaultdict at once may get two queues, and a message is lost
        pairs = itertools.product(range(world), repeat=2)
        self.wire: dict[tuple[int, int], queue.Queue[Tensor]] = {pair: queue.Queue() for pair in pairs}
        self.sent: dict[int, int] = defaultdict(int)  # values that a rank has sent to its partners
        self.limits: set[timedelta | None] = set()
        self.isend, self.irecv = "send", "receive"
        self.ReduceOp = SimpleNamespace(MAX="max")
        self.group = SimpleNamespace(WORLD=SimpleNamespace(ranks=list(range(world))))
        self.is_available = self.is_initialized = lambda: True

    def get_world_size(self, group: Any = None) -> int:
        return len(self._ranks(group))

    def get_rank(self, group: Any = None) -> int:
        return self._ranks(group).index(self.me.rank)

    def get_backend(self, group: Any = None) -> str:
        return self.backend

    def get_global_rank(self, group: Any, rank: int) -> int:
        return group.ranks[rank]

    def new_group(self, ranks: list[int], timeout: timedelta, use_local_synchronization: bool) -> Any:
        assert use_local_synchronization  # the ranks of the other nodes do not take part
        assert timeout == timedelta(seconds=TIMEOUT)
        return SimpleNamespace(ranks=ranks)

    def P2POp(self, end: str, tensor: Tensor, peer: int, group: Any) -> tuple[str, Tensor, int]:
        return end, tensor, peer

    def batch_isend_irecv(self, todo: list[tuple[str, Tensor, int]]) -> list[Any]:
        for end, tensor, peer in todo:
            if end == "send":
                self.sent[self.me.rank] += len(tensor)
                self._put(peer, tensor)
        return [self._work(lambda t=tensor, p=peer: self._get(p, t)) for end, tensor, peer in todo if end != "send"]

    def all_gather(self, every: list[Tensor], own: Tensor, group: Any = None, async_op: bool = False) -> Any:
        ranks = self._ranks(group)
        for rank in ranks:
            self._put(rank, own)
        return self._work(lambda: [self._get(rank, into) for rank, into in zip(ranks, every, strict=True)], async_op)

    def all_reduce(self, tensor: Tensor, op: str = "sum", group: Any = None, async_op: bool = False) -> Any:
        every = [torch.empty_like(tensor) for _ in self._ranks(group)]
        gathered = self.all_gather(every, tensor, group, async_op=True)
        reduced = lambda: torch.stack(every).amax(0) if op == "max" else torch.stack(every).sum(0)  # noqa: E731
        return self._work(lambda: (gathered.wait(), tensor.copy_(reduced())), async_op)

    def broadcast(self, tensor: Tensor, source: int, group: Any, async_op: bool) -> Any:
        if self.me.rank == source:
            for rank in group.ranks:
                self._put(rank, tensor)
        return self._work(lambda: self._get(source, tensor))

    def _ranks(self, group: Any) -> list[int]:
        return (group or self.group.WORLD).ranks

    def _put(self, peer: int, tensor: Tensor) -> None:
        self.wire[self.me.rank, peer].put(tensor.clone())

    def _get(self, peer: int, into: Tensor) -> None:
        into.copy_(self.wire[peer, self.me.rank].get(timeout=120))

    def _work(self, finish: Any, async_op: bool = True) -> Any:
        return SimpleNamespace(wait=lambda limit=None: (self.limits.add(limit), finish())) if async_op else finish()

    def run(self, work: Any) -> list[Any]:
        """`work(rank, world)` on every rank -> what each gave; the first error of one is raised."""
        found: list[Any] = [None] * self.world

        def one(rank: int) -> None:
            self.me.rank = rank
            try:
                found[rank] = work(rank, self.world)
            except Exception as error:
                found[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in found:
            if isinstance(error, Exception):
                raise error
        return found


@pytest.fixture
def wires(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Wires:
    made = Wires(*request.param) if isinstance(request.param, tuple) else Wires(request.param)
    for user in (module, distributed):
        monkeypatch.setattr(user, "dist", made)
    return made


@pytest.mark.parametrize("wires", [1, 2, 4, 8], indirect=True)
def test_ranks_merge_like_simulated_workers(wires: Wires) -> None:
    ranks = wires.run(merge)
    for name in ranks[0]:
        dtype = torch.float16 if "float16" in name else torch.float32
        simulated = adasum([[t.to(dtype).float() for t in deltas_of(rank)] for rank in range(wires.world)])
        for seen in ranks:
            for got, first, want in zip(seen[name], ranks[0][name], simulated, strict=True):
                assert torch.equal(got, first), "ranks disagree"
                torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
                assert torch.equal(got, want) or not name.startswith("full")
    assert wires.limits == {timedelta(seconds=TIMEOUT)}


@pytest.mark.parametrize("exchange", ["halving", "full"])
@pytest.mark.parametrize("wires", [2, 8], indirect=True)
def test_ranks_add_the_epsilon_of_simulated_workers(wires: Wires, exchange: str) -> None:
    def work(rank: int, world: int) -> Any:
        merger = AdaSum(rank, 1, world, weights(), exchange=exchange, eps=3.0, timeout=TIMEOUT)
        return merger(deltas_of(rank), weights(), [torch.zeros(s) for s in SHAPES])

    want = adasum([deltas_of(rank) for rank in range(wires.world)], eps=3.0)
    for seen in wires.run(work):
        for got, w in zip(seen, want, strict=True):
            torch.testing.assert_close(-got, w, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wires", [2, 4], indirect=True)
def test_a_step_of_ranks_is_the_step_worked_out_by_hand(wires: Wires) -> None:
    devices = 2 if wires.world == 4 else 1  # ranks in a node
    nodes = [
        [torch.stack(gs).mean(0) for gs in zip(*(deltas_of(n * devices + i) for i in range(devices)))]
        for n in range(wires.world // devices)
    ]
    merged = adasum([[0.5 * g for g in grads] for grads in nodes])
    for seen in wires.run(train):
        for got, w, m in zip(seen, weights(), merged, strict=True):
            torch.testing.assert_close(got, w - m, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("wires", [4], indirect=True)
def test_a_gradient_that_one_rank_of_a_node_lacks_is_zero_there(wires: Wires) -> None:
    """Rank i of a node has a gradient of layer i alone: alike in shape, and not to be added to each other."""

    def work(rank: int, world: int) -> Any:
        layers = [nn.Parameter(torch.zeros(2, 3)) for _ in range(3)]
        layers[rank % 2].grad = torch.full((2, 3), 2.0 ** (rank + 1))
        merger = AdaSum(rank, 2, world // 2, layers, timeout=TIMEOUT)
        merger.update_(lambda: None)
        return [p.grad for p in layers]

    for rank, (first, second, third) in enumerate(wires.run(work)):
        node = 4 ** (rank // 2)  # half of 2 and 4 in the first node, of 8 and 16 in the other
        assert first.unique().tolist() == [node]
        assert second.unique().tolist() == [2 * node]
        assert third is None


@pytest.mark.parametrize("wires", [(4, "gloo"), (4, "nccl")], ids=str, indirect=True)
def test_what_a_rank_sends_does_not_grow_with_the_nodes(wires: Wires) -> None:
    """Halves on the way down and up, and three products for each swap; "full" sends all at each level."""
    count = 64

    def work(rank: int, world: int, exchange: str) -> tuple[Tensor, ...]:
        merger = AdaSum(rank, 1, world, [nn.Parameter(torch.zeros(count))], exchange=exchange, timeout=TIMEOUT)
        delta = torch.randn(count, generator=torch.Generator().manual_seed(rank))
        return merger([delta], [delta], [torch.zeros(count)])

    wires.run(lambda rank, world: work(rank, world, "halving"))
    levels = 2
    assert set(wires.sent.values()) == {2 * (count // 2 + count // 4) + 3 * (1 + 2)}
    wires.sent.clear()
    wires.run(lambda rank, world: work(rank, world, "full"))
    assert set(wires.sent.values()) == {levels * count}
    assert wires.limits == {timedelta(seconds=TIMEOUT) if wires.backend == "gloo" else None}


@pytest.mark.parametrize("wires", [4], indirect=True)
def test_a_group_of_some_ranks_merges_among_them(wires: Wires) -> None:
    group = SimpleNamespace(ranks=[1, 3])

    def work(rank: int, world: int) -> Any:
        if rank not in group.ranks:
            return None
        own = group.ranks.index(rank)
        merger = AdaSum(own, 1, 2, weights(), process_group=group, timeout=TIMEOUT)
        return merger(deltas_of(own), weights(), [torch.zeros(s) for s in SHAPES])

    want = adasum([deltas_of(0), deltas_of(1)])
    for seen in (result for result in wires.run(work) if result is not None):
        for got, w in zip(seen, want, strict=True):
            torch.testing.assert_close(-got, w, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("wires", [2], indirect=True)
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda r: AdaSum(r, 2, 2, weights(), timeout=TIMEOUT), r"= 2 processes, got 2 x 2"),
        (lambda r: AdaSum(r, 0, 1, weights(), timeout=TIMEOUT), r"= 2 processes, got 0 x 1"),
        (lambda r: AdaSum(1 - r, 1, 2, weights(), timeout=TIMEOUT), "rank must be this process's rank"),
        (
            lambda r: AdaSum(r, 1, 2, weights()[: 2 + r], timeout=TIMEOUT),
            r"those of rank \d differ",
        ),
        (lambda r: AdaSum(r, 1, 2, weights()[r : 5 + r], timeout=TIMEOUT), "differ"),  # as many, of other shapes
        (lambda r: AdaSum(r, 1, 2, weights(), timeout=TIMEOUT)(weights()[1:], weights(), weights()), r"\(5, 6, 6\)"),
    ],
)
def test_what_ranks_cannot_agree_on_is_told_on_each(wires: Wires, make: Any, words: str) -> None:
    def told(rank: int, world: int) -> str:
        with pytest.raises(ValueError, match=words) as error:
            make(rank)
        return str(error.value)

    assert len(wires.run(told)) == 2


@pytest.mark.parametrize("wires", [2], indirect=True)
def test_nothing_to_merge_is_nothing(wires: Wires) -> None:
    assert wires.run(lambda rank, world: AdaSum(rank, 1, 2, [], timeout=TIMEOUT)([], [], [])) == [(), ()]


@pytest.mark.parametrize("wires", [2], indirect=True)
def test_a_peer_that_does_not_answer_is_named(wires: Wires) -> None:
    def work(rank: int, world: int) -> str:
        merger = AdaSum(rank, 1, 2, weights(), timeout=TIMEOUT)
        wires.batch_isend_irecv = lambda todo: [wires._work(_silence)]
        with pytest.raises(RuntimeError, match=f"on rank {rank} got no answer from rank {1 - rank} within 3 s"):
            merger(deltas_of(rank), weights(), weights())
        return "told"

    assert wires.run(work) == ["told", "told"]


def _silence() -> None:
    raise RuntimeError("Timed out waiting 3000ms for recv operation to complete")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_merged_updates_keep_their_dtype(dtype: torch.dtype) -> None:
    merged = adasum([[torch.full((2,), 3.0, dtype=dtype), torch.ones((), dtype=dtype)]] * 4)
    assert [m.dtype for m in merged] == [dtype, dtype]
    assert merged[0].tolist() == [3.0, 3.0]


def test_the_epsilon_grows_with_the_ranks_below_a_level() -> None:
    a, b, c, d = (torch.tensor([v, 0.0], dtype=torch.float64) for v in (1.0, 2.0, 3.0, 5.0))

    def pair(x: Tensor, y: Tensor, eps: float) -> Tensor:
        dot, xx, yy = (float(u @ v) + eps for u, v in ((x, y), (x, x), (y, y)))
        return (1 - dot / (2 * xx)) * x + (1 - dot / (2 * yy)) * y

    want = pair(pair(a, b, 2.0), pair(c, d, 2.0), 4.0)
    torch.testing.assert_close(adasum([[a], [b], [c], [d]], eps=1.0)[0], want, rtol=1e-14, atol=0)
    torch.testing.assert_close(adasum_pair(1e-6 * a, 1e-6 * b), pair(1e-6 * a, 1e-6 * b, 2e-12), rtol=1e-12, atol=0)
