"""`watch_loop` names every mistake of a loop, with the line that mends it, and is silent on loops that are right."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.checkpoint import checkpoint

from mpkit.diagnose import watch_loop
from mpkit.diagnose.mistakes import MISTAKES

Scaler = torch.amp.GradScaler


class Case:
    """A network of two layers with batches, an optimizer and a scaler: what a loop needs."""

    def __init__(self, init_scale: float = 2.0**10, optimizer: Callable[..., Any] = torch.optim.SGD, **options: Any):
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        self.optimizer = optimizer(self.net.parameters(), **({"lr": 0.05} | options))
        self.scaler = Scaler("cpu", init_scale=init_scale)
        self.batches = [(torch.randn(4, 6), torch.randint(3, (4,))) for _ in range(6)]

    def loss(self, x: Tensor, y: Tensor, dtype: torch.dtype = torch.float16) -> Tensor:
        with torch.autocast("cpu", dtype):
            return F.cross_entropy(self.net(x).float(), y)

    def overflowing(self) -> None:
        """Let the first steps overflow."""
        self.scaler.load_state_dict(self.scaler.state_dict() | {"scale": 2.0**20})

    def finish(self, clip: float | None = None) -> None:
        if clip is not None:
            self.scaler.unscale_(self.optimizer)
            clip_grad_norm_(self.net.parameters(), clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()


# --- loops that are wrong: what is passed to watch_loop is (net, optimizer, scaler) unless the loop says otherwise


def not_cleared(c: Case) -> None:
    for x, y in c.batches:
        c.scaler.scale(c.loss(x, y)).backward()
        c.finish()


def cleared_early(c: Case) -> None:
    for x, y in c.batches:
        c.scaler.scale(c.loss(x, y)).backward()
        c.optimizer.zero_grad()
        c.finish()


def cleared_early_to_zeros(c: Case) -> None:
    for x, y in c.batches:
        c.scaler.scale(c.loss(x, y)).backward()
        c.optimizer.zero_grad(set_to_none=False)
        c.finish()


def no_update(c: Case) -> None:
    for x, y in c.batches:
        c.optimizer.zero_grad()
        c.scaler.scale(c.loss(x, y)).backward()
        c.scaler.step(c.optimizer)


def no_update_one_step(c: Case) -> None:
    c.scaler.scale(c.loss(*c.batches[0])).backward()
    c.scaler.step(c.optimizer)


def no_update_unscaled(c: Case) -> None:
    for x, y in c.batches:
        c.optimizer.zero_grad()
        c.scaler.scale(c.loss(x, y)).backward()
        c.scaler.unscale_(c.optimizer)
        c.scaler.step(c.optimizer)


def update_per_micro_batch(c: Case) -> None:
    for i, (x, y) in enumerate(c.batches):
        c.scaler.scale(c.loss(x, y) / 3).backward()
        if i % 3 == 2:
            c.scaler.step(c.optimizer)
            c.optimizer.zero_grad()
        c.scaler.update()


def bare_step(c: Case) -> None:
    for x, y in c.batches:
        c.optimizer.zero_grad()
        c.scaler.scale(c.loss(x, y)).backward()
        c.optimizer.step()


def bare_step_and_update(c: Case) -> None:
    for x, y in c.batches:
        c.optimizer.zero_grad()
        c.scaler.scale(c.loss(x, y)).backward()
        c.optimizer.step()
        c.scaler.update()


def bare_step_after_unscale(c: Case) -> None:
    for x, y in c.batches:
        c.optimizer.zero_grad()
        c.scaler.scale(c.loss(x, y)).backward()
        c.scaler.unscale_(c.optimizer)
        c.optimizer.step()
        c.scaler.update()


def unscaled_backward(c: Case) -> None:
    c.scaler.scale(torch.ones(()))  # an earlier step made the scale
    for x, y in c.batches:
        c.optimizer.zero_grad()
        c.loss(x, y).backward()
        c.finish()


def unscaled_backward_from_the_first(c: Case) -> None:
    for x, y in c.batches:
        c.optimizer.zero_grad()
        c.loss(x, y).backward()
        c.finish()


def no_scaler(c: Case) -> None:
    for x, y in c.batches:
        c.optimizer.zero_grad()
        c.loss(x, y).backward()
        c.optimizer.step()


def no_scaler_closure(c: Case) -> None:
    def closure() -> Tensor:
        c.optimizer.zero_grad()
        loss = c.loss(*c.batches[0])
        loss.backward()
        return loss

    c.optimizer.step(closure)


def unscale_per_micro_batch(c: Case) -> None:
    for i, (x, y) in enumerate(c.batches):
        c.scaler.scale(c.loss(x, y) / 3).backward()
        c.scaler.unscale_(c.optimizer)
        if i % 3 == 2:
            c.finish()
            c.optimizer.zero_grad()


def unscale_per_micro_batch_and_update(c: Case) -> None:
    for i, (x, y) in enumerate(c.batches):
        c.scaler.scale(c.loss(x, y) / 3).backward()
        c.scaler.unscale_(c.optimizer)
        if i % 3 == 2:
            c.scaler.step(c.optimizer)
            c.optimizer.zero_grad()
        c.scaler.update()


def clip_before_unscale(c: Case) -> None:
    for x, y in c.batches:
        c.optimizer.zero_grad()
        c.scaler.scale(c.loss(x, y)).backward()
        clip_grad_norm_(c.net.parameters(), 1.0)
        c.finish()


def clip_before_unscale_value(c: Case) -> None:
    for x, y in c.batches:
        c.optimizer.zero_grad()
        c.scaler.scale(c.loss(x, y)).backward()
        clip_grad_value_(c.net.parameters(), 1.0)
        c.scaler.unscale_(c.optimizer)
        c.finish()


def clip_before_unscale_by_hand(c: Case) -> None:
    for x, y in c.batches:
        c.optimizer.zero_grad()
        c.scaler.scale(c.loss(x, y)).backward()
        for p in c.net.parameters():
            p.grad.data.clamp_(-0.5, 0.5)
        c.finish()


def clip_before_unscale_accumulated(c: Case) -> None:
    for i, (x, y) in enumerate(c.batches):
        c.scaler.scale(c.loss(x, y) / 2).backward()
        clip_grad_norm_(c.net.parameters(), 1.0)
        if i % 2:
            c.finish()
            c.optimizer.zero_grad()


def nan_hidden(c: Case) -> None:
    for x, y in c.batches:
        c.optimizer.zero_grad()
        c.scaler.scale(c.loss(x, y)).backward()
        for p in c.net.parameters():
            p.grad.nan_to_num_(0.0, 0.0, 0.0)
        c.finish()


def nan_hidden_out_of_place(c: Case) -> None:
    for x, y in c.batches:
        c.optimizer.zero_grad()
        c.scaler.scale(c.loss(x, y)).backward()
        for p in c.net.parameters():
            p.grad = torch.nan_to_num(p.grad)
        c.finish()


def nan_hidden_by_index(c: Case) -> None:
    c.overflowing()
    for x, y in c.batches:
        c.optimizer.zero_grad()
        c.scaler.scale(c.loss(x, y)).backward()
        for p in c.net.parameters():
            p.grad[~p.grad.isfinite()] = 0
        c.finish()


def nan_hidden_in_a_hook(c: Case) -> None:
    for p in c.net.parameters():
        p.register_hook(lambda g: torch.nan_to_num(g))
    for x, y in c.batches:
        c.optimizer.zero_grad()
        c.scaler.scale(c.loss(x, y)).backward()
        c.finish()


def inside_autocast(c: Case) -> None:
    for x, y in c.batches:
        c.optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            c.scaler.scale(c.loss(x, y)).backward()
        c.finish()


def inside_autocast_step(c: Case) -> None:
    for x, y in c.batches:
        c.optimizer.zero_grad()
        loss = c.loss(x, y, torch.bfloat16)
        loss.backward()
        with torch.autocast("cpu", torch.bfloat16):
            c.optimizer.step()


def new_scaler(c: Case) -> None:
    for _ in range(2):
        c.scaler = Scaler("cpu", init_scale=2.0**10)
        for x, y in c.batches[:2]:
            c.optimizer.zero_grad()
            c.scaler.scale(c.loss(x, y)).backward()
            c.finish()


def schedule_counts_skips(c: Case) -> None:
    c.overflowing()
    schedule = torch.optim.lr_scheduler.StepLR(c.optimizer, 100)
    for x, y in c.batches:
        c.optimizer.zero_grad()
        c.scaler.scale(c.loss(x, y)).backward()
        c.finish()
        schedule.step()


def schedule_counts_skips_before_update(c: Case) -> None:
    c.overflowing()
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(c.optimizer, 100)
    for x, y in c.batches:
        c.optimizer.zero_grad()
        c.scaler.scale(c.loss(x, y)).backward()
        c.scaler.step(c.optimizer)
        schedule.step()
        c.scaler.update()


def schedule_counts_skips_by_hand(c: Case) -> None:
    c.overflowing()
    for i, (x, y) in enumerate(c.batches):
        for group in c.optimizer.param_groups:
            group["lr"] = 0.01 * (i + 1)
        c.optimizer.zero_grad()
        c.scaler.scale(c.loss(x, y)).backward()
        c.finish()


def not_divided(c: Case) -> None:
    for i, (x, y) in enumerate(c.batches):
        c.scaler.scale(c.loss(x, y)).backward()
        if i % 3 == 2:
            c.finish(clip=1.0)
            c.optimizer.zero_grad()


def not_divided_bfloat16(c: Case) -> None:
    for i, (x, y) in enumerate(c.batches):
        with torch.autocast("cpu", torch.bfloat16):
            loss = ((c.net(x) - F.one_hot(y, 3)) ** 2).mean()
        loss.backward()
        if i % 3 == 2:
            c.optimizer.step()
            c.optimizer.zero_grad()


def scaled_penalty(c: Case) -> None:
    params = list(c.net.parameters())
    for x, y in c.batches:
        c.optimizer.zero_grad()
        loss = c.loss(x, y)
        grads = torch.autograd.grad(c.scaler.scale(loss), params, create_graph=True)
        norm = torch.stack([g.pow(2).sum() for g in grads]).sum().sqrt()
        c.scaler.scale(loss + 1e-3 * norm).backward()
        c.finish()


def idle_optimizer(c: Case) -> tuple[Any, ...]:
    first, second = (torch.optim.SGD(c.net[i].parameters(), 0.1) for i in (0, 2))

    def loop() -> None:
        for x, y in c.batches:
            c.net.zero_grad()
            c.scaler.scale(c.loss(x, y)).backward()
            c.scaler.step(first)
            c.scaler.update()

    return loop, [first, second]


WRONG = [
    not_cleared, cleared_early, cleared_early_to_zeros, no_update, no_update_one_step, no_update_unscaled,
    update_per_micro_batch, bare_step, bare_step_and_update, bare_step_after_unscale, unscaled_backward,
    unscaled_backward_from_the_first, no_scaler, no_scaler_closure, unscale_per_micro_batch,
    unscale_per_micro_batch_and_update, clip_before_unscale, clip_before_unscale_value, clip_before_unscale_by_hand,
    clip_before_unscale_accumulated, nan_hidden, nan_hidden_out_of_place, nan_hidden_by_index, nan_hidden_in_a_hook,
    inside_autocast, inside_autocast_step, new_scaler, schedule_counts_skips, schedule_counts_skips_before_update,
    schedule_counts_skips_by_hand, not_divided, not_divided_bfloat16, scaled_penalty, idle_optimizer,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("given", [True, False], ids=["scaler given", "scaler found"])
@pytest.mark.parametrize("loop", WRONG, ids=lambda f: f.__name__)
def test_a_wrong_loop_is_named(loop, given):
    c = Case()
    run, optimizer = loop(c) if loop is idle_optimizer else (lambda: loop(c), c.optimizer)
    with (
        contextlib.suppress(AssertionError, RuntimeError),
        watch_loop(c.net, optimizer, c.scaler if given else None) as report,
    ):
        run()
    (found,) = report.findings
    assert loop.__name__.startswith(found.mistake), str(report)
    assert found.advice == MISTAKES[found.mistake]
    assert "SGD" in found.where
    assert "step" in found.where
    assert "line" in found.where or found.mistake in ("no_update", "idle_optimizer", "schedule_counts_skips")
    assert found.mistake in str(report)


def test_every_mistake_has_a_loop():
    assert all(any(loop.__name__.startswith(mistake) for loop in WRONG) for mistake in MISTAKES)
    assert all("(" in advice or "`" in advice for advice in MISTAKES.values())  # a line that mends it


# --- loops that are right


def usual(c: Case) -> None:
    for x, y in c.batches:
        c.optimizer.zero_grad()
        c.scaler.scale(c.loss(x, y)).backward()
        c.finish()


def cleared_to_zeros_at_the_end(c: Case) -> None:
    for x, y in c.batches:
        c.scaler.scale(c.loss(x, y)).backward()
        c.finish(clip=0.1)
        c.optimizer.zero_grad(set_to_none=False)


def cleared_by_hand(c: Case) -> None:
    for x, y in c.batches:
        for p in c.net.parameters():
            if p.grad is not None:
                p.grad.data.zero_()
        c.scaler.scale(c.loss(x, y)).backward()
        c.finish()


def clipped(c: Case) -> None:
    for x, y in c.batches:
        c.optimizer.zero_grad()
        c.scaler.scale(c.loss(x, y)).backward()
        c.scaler.unscale_(c.optimizer)
        clip_grad_value_(c.net.parameters(), 0.01)
        clip_grad_norm_(c.net.parameters(), 0.01)
        c.finish()


def accumulated(c: Case) -> None:
    for i, (x, y) in enumerate(c.batches):
        c.scaler.scale(c.loss(x, y) / 3).backward()
        if i % 3 == 2:
            c.finish(clip=0.1)
            c.optimizer.zero_grad()


def accumulated_with_a_rest(c: Case) -> None:
    for i, (x, y) in enumerate(c.batches):
        (c.loss(x, y, torch.bfloat16) * 0.25).backward()
        if i % 4 == 3 or i == len(c.batches) - 1:
            c.optimizer.step()
            c.optimizer.zero_grad()


def accumulated_sums(c: Case) -> None:
    for i, (x, y) in enumerate(c.batches):
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(c.net(x).float(), y, reduction="sum") / (3 * len(x))
        c.scaler.scale(loss).backward()
        if i % 3 == 2:
            c.finish()
            c.optimizer.zero_grad()


def accumulated_and_divided_later(c: Case) -> None:
    for i, (x, y) in enumerate(c.batches):
        c.scaler.scale(c.loss(x, y)).backward()
        if i % 3 == 2:
            for p in c.net.parameters():
                p.grad /= 3
            c.finish()
            c.optimizer.zero_grad()


def accumulated_divided_later_and_clipped(c: Case) -> None:
    for i, (x, y) in enumerate(c.batches):
        c.loss(x, y, torch.bfloat16).backward()
        if i % 3 == 2:
            for p in c.net.parameters():
                p.grad /= 3
            clip_grad_norm_(c.net.parameters(), 0.01)
            c.optimizer.step()
            c.optimizer.zero_grad()


def overflows_at_first(c: Case) -> None:
    c.overflowing()
    schedule = torch.optim.lr_scheduler.StepLR(c.optimizer, 1)
    for x, y in c.batches:
        c.optimizer.zero_grad()
        c.scaler.scale(c.loss(x, y)).backward()
        before = c.scaler.get_scale()
        c.finish(clip=0.1)
        if c.scaler.get_scale() >= before:
            schedule.step()


def rate_per_epoch(c: Case) -> None:
    c.overflowing()
    schedule = torch.optim.lr_scheduler.StepLR(c.optimizer, 1)
    for _ in range(2):
        usual(c)
        schedule.step()


def two_losses(c: Case) -> None:
    for x, y in c.batches:
        c.optimizer.zero_grad()
        loss = c.loss(x, y)
        c.scaler.scale(loss).backward(retain_graph=True)
        c.scaler.scale(loss**2).backward()
        c.finish()


def tasks_in_a_row(c: Case) -> None:
    for x, y in c.batches:
        c.optimizer.zero_grad()
        for loss in (c.loss(x, y), c.loss(-x, y)):
            c.scaler.scale(loss).backward(retain_graph=True)
        c.finish()


def two_optimizers(c: Case) -> tuple[Any, ...]:
    both = [torch.optim.SGD(c.net[0].parameters(), 0.1), torch.optim.AdamW(c.net[2].parameters(), 1e-3)]

    def loop() -> None:
        for x, y in c.batches:
            c.net.zero_grad()
            c.scaler.scale(c.loss(x, y)).backward()
            for optimizer in both:
                c.scaler.unscale_(optimizer)
                c.scaler.step(optimizer)
            c.scaler.update()

    return loop, both


def gan(c: Case) -> tuple[Any, ...]:
    """The order of torch's DCGAN tutorial: gradients of the judge are cleared just before its own backward passes."""
    maker, judge = nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    makes, judges = torch.optim.Adam(maker.parameters()), torch.optim.Adam(judge.parameters())
    says = nn.BCEWithLogitsLoss()

    def loop() -> None:
        for x, _ in c.batches:
            with torch.autocast("cpu", torch.float16):
                fake = maker(torch.randn(4, 4))
                real = says(judge(x).float(), torch.ones(4, 1))
            judge.zero_grad()
            c.scaler.scale(real).backward()
            with torch.autocast("cpu", torch.float16):
                false = says(judge(fake.detach()).float(), torch.zeros(4, 1))
            c.scaler.scale(false).backward()
            c.scaler.step(judges)
            maker.zero_grad()
            with torch.autocast("cpu", torch.float16):
                fooled = says(judge(fake).float(), torch.ones(4, 1))
            c.scaler.scale(fooled).backward()
            c.scaler.step(makes)
            c.scaler.update()

    return loop, [makes, judges], nn.ModuleList([maker, judge])


def critic_more_often(c: Case) -> tuple[Any, ...]:
    """A critic with a gradient penalty on its input takes five steps before the generator takes one."""
    maker, critic = nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    makes, judges = torch.optim.Adam(maker.parameters()), torch.optim.Adam(critic.parameters())

    def loop() -> None:
        for x, _ in c.batches[:3]:
            judges.zero_grad()
            fake = maker(torch.randn(4, 4)).detach()
            between = (x + fake).requires_grad_()
            out = critic(between)
            (slope,) = torch.autograd.grad(out, between, torch.ones_like(out), create_graph=True)
            loss = critic(fake).mean() - critic(x).mean() + 10 * ((slope.norm(2, 1) - 1) ** 2).mean()
            loss.backward()
            judges.step()

    return loop, {"maker": makes, "critic": judges}, [maker, critic]


def gradient_penalty(c: Case) -> None:
    params = list(c.net.parameters())
    for x, y in c.batches:
        c.optimizer.zero_grad()
        loss = c.loss(x, y)
        grads = torch.autograd.grad(c.scaler.scale(loss), params, create_graph=True)
        inverse = 1.0 / c.scaler.get_scale()
        grads = [g * inverse for g in grads]
        norm = torch.stack([g.pow(2).sum() for g in grads]).sum().sqrt()
        c.scaler.scale(loss + 1e-3 * norm).backward()
        c.finish()


def gradient_penalty_flat(c: Case) -> None:
    for x, y in c.batches:
        c.optimizer.zero_grad()
        loss = c.loss(x, y)
        grads = torch.autograd.grad(c.scaler.scale(loss), list(c.net.parameters()), create_graph=True)
        norm = torch.cat([g.flatten() for g in grads]).norm() / c.scaler.get_scale()
        c.scaler.scale(loss + (norm - 1) ** 2).backward()
        c.finish()


def closure(c: Case) -> tuple[Any, ...]:
    def evaluate() -> Tensor:
        c.optimizer.zero_grad()
        loss = c.loss(*c.batches[0], torch.bfloat16)
        loss.backward()
        return loss

    def loop() -> None:
        for _ in range(3):
            c.optimizer.step(evaluate)

    c.optimizer = torch.optim.LBFGS(c.net.parameters(), max_iter=3)
    return loop, c.optimizer


def skips_by_hand(c: Case) -> None:
    c.overflowing()
    for x, y in c.batches:
        c.optimizer.zero_grad()
        c.scaler.scale(c.loss(x, y)).backward()
        c.scaler.unscale_(c.optimizer)
        if clip_grad_norm_(c.net.parameters(), 1.0).isfinite():
            c.scaler.step(c.optimizer)
        c.scaler.update()


def static_scale_by_hand(c: Case) -> None:
    for x, y in c.batches:
        c.optimizer.zero_grad()
        (c.loss(x, y) * 1024).backward()
        for p in c.net.parameters():
            p.grad /= 1024
        clip_grad_norm_(c.net.parameters(), 1.0)
        c.optimizer.step()


def plain_float32(c: Case) -> None:
    for x, y in c.batches:
        c.optimizer.zero_grad()
        F.cross_entropy(c.net(x), y).backward()
        c.optimizer.step()


def disabled_scaler(c: Case) -> None:
    c.scaler = Scaler("cpu", enabled=False)
    for x, y in c.batches:
        c.optimizer.zero_grad()
        c.scaler.scale(c.loss(x, y, torch.bfloat16)).backward()
        c.finish(clip=1.0)


def padding_row_set_to_zero(c: Case) -> None:
    for x, y in c.batches:
        c.optimizer.zero_grad()
        c.scaler.scale(c.loss(x, y)).backward()
        c.net[0].weight.grad[0] = 0
        c.finish()


def checkpointed(c: Case) -> None:
    inner = c.net[1:]
    for reentrant in (True, False):
        for x, y in c.batches:
            c.optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                out = checkpoint(inner, c.net[0](x), use_reentrant=reentrant)
                loss = F.cross_entropy(out.float(), y)
            c.scaler.scale(loss).backward()
            c.finish()


def compiled(c: Case) -> None:
    network = torch.compile(c.net, backend="eager", fullgraph=True)
    for x, y in c.batches:
        c.optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(network(x).nan_to_num().float(), y)
        c.scaler.scale(loss).backward()
        c.finish(clip=0.1)


def step_in_the_backward_pass(c: Case) -> tuple[Any, ...]:
    each = {p: torch.optim.SGD([p], 0.1) for p in c.net.parameters()}

    def update(p: Tensor) -> None:
        each[p].step()
        each[p].zero_grad()

    def loop() -> None:
        for p in each:
            p.register_post_accumulate_grad_hook(update)
        for x, y in c.batches:
            c.loss(x, y, torch.bfloat16).backward()

    return loop, list(each.values())


def scaler_of_mpkit(c: Case) -> tuple[Any, ...]:
    from mpkit.scalers import DynamicLossScaler, all_finite

    c.scaler = DynamicLossScaler(2**10, 2, 50)

    def loop() -> None:
        for x, y in c.batches:
            c.optimizer.zero_grad()
            c.scaler.scale(c.loss(x, y)).backward()
            grads = c.scaler.unscale([p.grad for p in c.net.parameters()])
            for p, grad in zip(c.net.parameters(), grads):
                p.grad = grad
            finite = all_finite(grads)
            if finite:
                c.optimizer.step()
            c.scaler.adjust(finite)

    return loop, c.optimizer


def cell_of_mpkit(c: Case) -> tuple[Any, ...]:
    from mpkit.step import TrainOneStepWithLossScaleCell, WithLossCell

    cell = TrainOneStepWithLossScaleCell(WithLossCell(c.net, nn.CrossEntropyLoss()), c.optimizer, torch.tensor(1024.0))

    def loop() -> None:
        for x, y in c.batches:
            cell(x, y)

    return loop, c.optimizer


RIGHT = [
    usual, cleared_to_zeros_at_the_end, cleared_by_hand, clipped, accumulated, accumulated_with_a_rest,
    accumulated_sums, accumulated_and_divided_later, accumulated_divided_later_and_clipped, overflows_at_first,
    rate_per_epoch, two_losses, tasks_in_a_row, two_optimizers, gan, critic_more_often, gradient_penalty,
    gradient_penalty_flat, closure, skips_by_hand, static_scale_by_hand, plain_float32, disabled_scaler,
    padding_row_set_to_zero, checkpointed, compiled, step_in_the_backward_pass, scaler_of_mpkit, cell_of_mpkit,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("loop", RIGHT, ids=lambda f: f.__name__)
def test_a_right_loop_has_no_finding(loop):
    c = Case()
    network, optimizer, run = c.net, c.optimizer, loop
    if "tuple" in str(loop.__annotations__["return"]):
        run, optimizer, *rest = loop(c)
        network = rest[0] if rest else network
    with watch_loop(network, optimizer, None if "mpkit" not in loop.__name__ else c.scaler) as report:
        run() if run is not loop else run(c)
    assert report.findings == [], str(report)
    assert report.steps >= 2
    assert "no mistake" in str(report)


@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.SGD, {"foreach": True}), (torch.optim.Adam, {"fused": True}), (torch.optim.AdamW, {"foreach": True})],
)
@pytest.mark.parametrize("loop", [usual, accumulated, overflows_at_first, clipped, gradient_penalty])
@pytest.mark.filterwarnings("ignore:Detected call of")
def test_right_loops_with_other_kernels(loop, kind, options):
    c = Case(optimizer=kind, **options)
    with watch_loop(c.net, c.optimizer) as report:
        loop(c)
    assert report.findings == [], str(report)


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("loop", [bare_step, not_cleared, schedule_counts_skips, clip_before_unscale, cleared_early])
def test_wrong_loops_with_a_fused_optimizer(loop):
    c = Case(optimizer=torch.optim.Adam, fused=True)
    with contextlib.suppress(AssertionError), watch_loop(c.net, c.optimizer, c.scaler) as report:
        loop(c)
    assert [f.mistake for f in report.findings] == [loop.__name__], str(report)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_the_loop_of_lightning_has_no_finding(precision, tmp_path):
    lightning = pytest.importorskip("lightning.pytorch", reason="pip install lightning: its loop is what is watched")
    c = Case()

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = c.net

        def training_step(self, batch: Any, _index: int) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return [c.optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(c.optimizer, 1), "interval": "step"}]

    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, precision=precision, max_epochs=1, accumulate_grad_batches=2,
        gradient_clip_val=0.1, default_root_dir=tmp_path, **quiet,
    )  # fmt: skip
    with watch_loop(c.net, c.optimizer) as report:
        trainer.fit(Module(), torch.utils.data.DataLoader(c.batches, batch_size=None))
    assert (report.findings, report.steps) == ([], 3), str(report)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scaled", [False, True])
def test_the_loop_of_accelerate_has_no_finding(scaled):
    accelerate = pytest.importorskip("accelerate", reason="pip install accelerate: its loop is what is watched")
    c = Case()
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(
        cpu=True, mixed_precision="no" if scaled else "bf16", gradient_accumulation_steps=2
    )
    accelerator.scaler = c.scaler if scaled else None  # as mixed_precision="fp16" makes it on a GPU
    schedule = torch.optim.lr_scheduler.StepLR(c.optimizer, 1)
    network, optimizer, schedule = accelerator.prepare(c.net, c.optimizer, schedule)
    with watch_loop(network, optimizer, accelerator.scaler) as report:
        for x, y in c.batches:
            with accelerator.accumulate(network):
                accelerator.backward(F.cross_entropy(network(x), y))
                if accelerator.sync_gradients and not scaled:  # it unscales for "fp16" alone
                    accelerator.clip_grad_norm_(network.parameters(), 0.1)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    assert (report.findings, report.steps) == ([], 3), str(report)


# --- what watching leaves behind


def test_the_training_is_the_same_and_nothing_stays():
    names = [
        (torch.autograd, "backward"),
        (torch.autograd, "grad"),
        (torch.Tensor, "nan_to_num_"),
        (torch, "nan_to_num"),
    ]
    names += [(Scaler, name) for name in ("scale", "unscale_", "step", "update")] + [(torch.autocast, "__enter__")]
    before = [getattr(owner, name) for owner, name in names]
    watched, bare = Case(), Case()
    with watch_loop(watched.net, watched.optimizer, watched.scaler):
        accumulated(watched)
    accumulated(bare)
    for a, b in zip(watched.net.parameters(), bare.net.parameters()):
        assert torch.equal(a, b)
    assert [getattr(owner, name) for owner, name in names] == before
    assert "nan_to_num_" not in vars(torch.Tensor)


def test_an_error_in_the_loop_gets_the_report():
    c = Case()
    with pytest.raises(AssertionError) as caught, watch_loop(c.net, c.optimizer, c.scaler):
        bare_step_and_update(c)
    assert any("bare_step" in note for note in caught.value.__notes__)
    usual(c)  # and torch is as it was


def test_an_optimizer_that_was_not_named_is_seen():
    c = Case()
    first, second = (torch.optim.SGD(c.net[i].parameters(), 0.1) for i in (0, 2))
    with watch_loop(c.net, first) as report:
        for x, y in c.batches:
            first.zero_grad()
            c.loss(x, y, torch.bfloat16).backward()
            first.step()
            second.step()
    assert [(f.mistake, f.where.split(",")[0]) for f in report.findings] == [("not_cleared", "optimizer 2 (SGD)")]


def test_a_loop_outside_of_the_block_is_not_seen():
    c = Case()
    with watch_loop(c.net, c.optimizer) as report:
        pass
    assert "inside the `with` block" in str(report)
    not_cleared(c)
    assert (report.findings, report.steps) == ([], 0)


@pytest.mark.parametrize("wrong", [("net", None), (None, "optimizer"), ("net", "optimizer", 1024.0), ([], "optimizer")])
def test_wrong_arguments(wrong):
    c = Case()
    known = {"net": c.net, "optimizer": c.optimizer}
    with pytest.raises(TypeError, match="must"):
        watch_loop(*(known.get(w, w) if isinstance(w, str) else w for w in wrong))
