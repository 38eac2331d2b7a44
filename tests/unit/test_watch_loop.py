"""`watch_loop` names every mistake of a loop, with the line that mends it, and is silent on loops that are right."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
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
    """A network of two layers with batches, an optimizer, a scaler and a schedule; its methods are the words of a loop.

    A loop is a text: its words run for each batch, those behind "3:" for every third alone.
    """

    def __init__(self, init_scale: float = 2.0**10, optimizer: Callable[..., Any] = torch.optim.SGD, **options: Any):
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        self.optimizer = optimizer(self.net.parameters(), **({"lr": 0.05} | options))
        self.scaler = Scaler("cpu", init_scale=init_scale)
        self.batches = [(torch.randn(4, 6), torch.randint(3, (4,))) for _ in range(6)]
        self.batch = self.batches[0]
        self.optimizers = [self.optimizer]

    def each(self) -> Iterator[int]:
        for i, batch in enumerate(self.batches):
            self.batch = batch
            yield i

    def run(self, loop: str) -> None:
        for i in self.each():
            for word in loop.split():
                if i % 3 == 2 or not word.startswith("3:"):
                    getattr(self, word.removeprefix("3:"))()

    # --- forwards

    def loss(self, dtype: torch.dtype = torch.float16) -> Tensor:
        with torch.autocast("cpu", dtype):
            return F.cross_entropy(self.net(self.batch[0]).float(), self.batch[1])

    def scaled(self) -> None:
        self.scaler.scale(self.loss()).backward()

    def scaled_third(self) -> None:
        self.scaler.scale(self.loss() / 3).backward()

    def scaled_inside(self) -> None:
        with torch.autocast("cpu", torch.float16):
            self.scaler.scale(self.loss()).backward()

    def scaled_sums(self) -> None:
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(self.net(self.batch[0]).float(), self.batch[1], reduction="sum") / 12
        self.scaler.scale(loss).backward()

    def unscaled(self) -> None:
        self.loss().backward()

    def bfloat16(self) -> None:
        self.loss(torch.bfloat16).backward()

    def bfloat16_third(self) -> None:
        (self.loss(torch.bfloat16) / 3).backward()

    def bfloat16_squares(self) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = ((self.net(self.batch[0]) - F.one_hot(self.batch[1], 3)) ** 2).mean()
        loss.backward()

    def float32(self) -> None:
        F.cross_entropy(self.net(self.batch[0]), self.batch[1]).backward()

    def by_hand(self) -> None:
        (self.loss() * 1024).backward()

    # --- what is done to gradients

    def clear(self) -> None:
        self.optimizer.zero_grad()

    def clear_all(self) -> None:
        self.net.zero_grad()

    def zeros(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)

    def change(self, function: Callable[[Tensor], Any]) -> None:
        for p in self.net.parameters():
            if p.grad is not None:
                function(p.grad)

    def zeros_by_hand(self) -> None:
        self.change(lambda g: g.data.zero_())

    def unscale(self) -> None:
        self.scaler.unscale_(self.optimizer)

    def unscale_by_hand(self) -> None:
        self.change(lambda g: g.div_(1024))

    def clip(self) -> None:
        clip_grad_norm_(self.net.parameters(), 0.01)

    def clip_value(self) -> None:
        clip_grad_value_(self.net.parameters(), 0.01)

    def clip_by_hand(self) -> None:
        self.change(lambda g: g.data.clamp_(-0.5, 0.5))

    def agc(self) -> None:
        """Adaptive gradient clipping: each gradient at most a hundredth of its weight."""
        for p in self.net.parameters():
            p.grad.mul_((0.01 * p.detach().norm() / p.grad.norm()).clamp(max=1))

    def divide(self) -> None:
        self.change(lambda g: g.div_(3))

    def no_nan(self) -> None:
        self.change(lambda g: g.nan_to_num_(0.0, 0.0, 0.0))

    def no_nan_out_of_place(self) -> None:
        for p in self.net.parameters():
            p.grad = torch.nan_to_num(p.grad)

    def no_nan_by_index(self) -> None:
        self.change(lambda g: g.masked_fill_(~g.isfinite(), 0))

    def zero_row(self) -> None:
        self.net[0].weight.grad[0] = 0

    # --- the step and what comes after

    def step(self) -> None:
        self.scaler.step(self.optimizer)

    def bare(self) -> None:
        self.optimizer.step()

    def bare_inside(self) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            self.optimizer.step()

    def step_both(self) -> None:
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
            self.scaler.step(optimizer)

    def step_if_finite(self) -> None:
        if clip_grad_norm_(self.net.parameters(), 1.0).isfinite():
            self.scaler.step(self.optimizer)

    def update(self) -> None:
        self.scaler.update()

    def other_scaler(self) -> None:
        self.scaler = Scaler("cpu", init_scale=2.0**10)

    def higher_rate(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] += 0.01

    # --- before the loop

    def overflowing(self) -> None:
        """Let the first steps overflow."""
        self.scaler.load_state_dict(self.scaler.state_dict() | {"scale": 2.0**20})

    def scheduled(self) -> None:
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(self.optimizer, 100)

    def schedule_step(self) -> None:
        self.schedule.step()

    def hooked(self) -> None:
        for p in self.net.parameters():
            p.register_hook(lambda g: torch.nan_to_num(g))

    def finish(self) -> None:
        self.step()
        self.update()

    def disabled(self) -> None:
        self.scaler = Scaler("cpu", enabled=False)

    def two(self) -> None:
        self.optimizers = [torch.optim.SGD(self.net[i].parameters(), 0.1) for i in (0, 2)]
        self.optimizer = self.optimizers[0]


Loop = tuple[str, str, str]  # the mistake, words before the loop, and the loop
WRONG: list[Loop] = [
    ("not_cleared", "", "scaled step update"),
    ("cleared_early", "", "scaled clear step update"),
    ("cleared_early", "", "scaled zeros step update"),
    ("no_update", "", "clear scaled step"),
    ("no_update", "", "clear scaled unscale step"),
    ("no_update", "", "3:clear 3:scaled 3:step"),
    ("update_per_micro_batch", "", "scaled_third 3:step 3:clear update"),
    ("bare_step", "", "clear scaled bare"),
    ("bare_step", "", "clear scaled bare update"),
    ("bare_step", "", "clear scaled unscale bare update"),
    ("unscaled_backward", "", "clear unscaled step update"),
    ("no_scaler", "", "clear unscaled bare"),
    ("unscale_per_micro_batch", "", "scaled_third unscale 3:step 3:update 3:clear"),
    ("unscale_per_micro_batch", "", "scaled_third unscale 3:step 3:clear update"),
    ("clip_before_unscale", "", "clear scaled clip step update"),
    ("clip_before_unscale", "", "clear scaled clip_value unscale step update"),
    ("clip_before_unscale", "", "clear scaled clip_by_hand step update"),
    ("clip_before_unscale", "", "scaled_third clip 3:step 3:update 3:clear"),
    ("nan_hidden", "", "clear scaled no_nan step update"),
    ("nan_hidden", "", "clear scaled no_nan_out_of_place step update"),
    ("nan_hidden", "overflowing", "clear scaled no_nan_by_index step update"),
    ("nan_hidden", "hooked", "clear scaled step update"),
    ("inside_autocast", "", "clear scaled_inside step update"),
    ("inside_autocast", "", "clear bfloat16 bare_inside"),
    ("new_scaler", "", "clear scaled step update 3:other_scaler"),
    ("schedule_counts_skips", "overflowing scheduled", "clear scaled step update schedule_step"),
    ("schedule_counts_skips", "overflowing scheduled", "clear scaled step schedule_step update"),
    ("schedule_counts_skips", "overflowing", "higher_rate clear scaled step update"),
    ("not_divided", "", "scaled 3:unscale 3:clip 3:step 3:update 3:clear"),
    ("not_divided", "", "bfloat16_squares 3:bare 3:clear"),
    ("idle_optimizer", "two", "clear_all scaled step update"),
]


def scaled_penalty(c: Case) -> None:
    params = list(c.net.parameters())
    for _ in c.each():
        loss = c.loss()
        grads = torch.autograd.grad(c.scaler.scale(loss), params, create_graph=True)
        norm = torch.stack([g.pow(2).sum() for g in grads]).sum().sqrt()
        c.scaler.scale(loss + 1e-3 * norm).backward()
        for word in ("step", "update", "clear"):
            getattr(c, word)()


def no_scaler(c: Case) -> None:
    def closure() -> Tensor:
        c.optimizer.zero_grad()
        loss = c.loss()
        loss.backward()
        return loss

    c.optimizer.step(closure)


def watched(c: Case, loop: Any, before: str = "", given: bool = True) -> Any:
    """The report on a loop, which may end in an error."""
    for word in before.split():
        getattr(c, word)()
    scaler = c.scaler if given else None
    with contextlib.suppress(AssertionError, RuntimeError), watch_loop(c.net, c.optimizers, scaler) as report:
        c.run(loop) if isinstance(loop, str) else loop(c)
    return report


FUNCTIONS: list[tuple[str, str, Any]] = [(f.__name__, "", f) for f in (scaled_penalty, no_scaler)]


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("given", [True, False], ids=["scaler given", "scaler found"])
@pytest.mark.parametrize(("mistake", "before", "loop"), WRONG + FUNCTIONS, ids=lambda v: getattr(v, "__name__", str(v)))
def test_a_wrong_loop_is_named(mistake, before, loop, given):
    report = watched(Case(), loop, before, given)
    (found,) = report.findings
    assert found.mistake == mistake, str(report)
    assert found.advice == MISTAKES[found.mistake]
    assert "SGD" in found.where
    assert "step" in found.where
    assert "line" in found.where or found.mistake in ("no_update", "idle_optimizer", "schedule_counts_skips")
    assert found.mistake in str(report)


def test_every_mistake_has_a_loop():
    assert {mistake for mistake, *_ in WRONG + FUNCTIONS} == set(MISTAKES)
    assert all("(" in advice or "`" in advice for advice in MISTAKES.values())  # a line that mends it


# --- loops that are right: words before them, and the loop

RIGHT: list[tuple[str, str]] = [
    ("", "clear scaled step update"),
    ("", "scaled unscale clip step update zeros"),
    ("", "zeros_by_hand scaled step update"),
    ("", "clear scaled unscale clip_value clip step update"),
    ("", "scaled_third 3:unscale 3:clip 3:step 3:update 3:clear"),
    ("", "scaled_sums 3:step 3:update 3:clear"),
    ("", "scaled 3:divide 3:step 3:update 3:clear"),
    ("", "bfloat16_third 3:bare 3:clear"),
    ("", "bfloat16 3:divide 3:clip 3:bare 3:clear"),
    ("overflowing", "clear scaled step update"),
    ("overflowing scheduled", "clear scaled step update 3:schedule_step"),
    ("overflowing", "clear scaled unscale step_if_finite update"),
    ("", "clear by_hand unscale_by_hand clip bare"),
    ("", "clear float32 bare"),
    ("disabled", "clear bfloat16 unscale clip step update"),
    ("", "clear scaled zero_row step update"),
    ("two", "clear_all scaled step_both update"),
]


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize(("before", "loop"), RIGHT)
def test_a_right_loop_of_words_has_no_finding(before, loop):
    report = watched(Case(), loop, before, given=False)
    assert report.findings == [], str(report)
    assert report.steps >= 2
    assert "no mistake" in str(report)


def with_a_rest(c: Case) -> None:
    for i in c.each():
        (c.loss(torch.bfloat16) * 0.25).backward()
        if i % 4 == 3 or i == len(c.batches) - 1:
            c.bare()
            c.clear()


def two_losses(c: Case) -> None:
    for _ in c.each():
        c.optimizer.zero_grad()
        loss = c.loss()
        c.scaler.scale(loss).backward(retain_graph=True)
        c.scaler.scale(loss**2).backward()
        c.finish()


def tasks_in_a_row(c: Case) -> None:
    for _ in c.each():
        c.optimizer.zero_grad()
        for loss in (c.loss(), c.loss() ** 2):
            c.scaler.scale(loss).backward(retain_graph=True)
        c.finish()


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
    for _ in c.each():
        c.optimizer.zero_grad()
        loss = c.loss()
        grads = torch.autograd.grad(c.scaler.scale(loss), params, create_graph=True)
        inverse = 1.0 / c.scaler.get_scale()
        grads = [g * inverse for g in grads]
        norm = torch.stack([g.pow(2).sum() for g in grads]).sum().sqrt()
        c.scaler.scale(loss + 1e-3 * norm).backward()
        c.finish()


def gradient_penalty_flat(c: Case) -> None:
    for _ in c.each():
        c.optimizer.zero_grad()
        loss = c.loss()
        grads = torch.autograd.grad(c.scaler.scale(loss), list(c.net.parameters()), create_graph=True)
        norm = torch.cat([g.flatten() for g in grads]).norm() / c.scaler.get_scale()
        c.scaler.scale(loss + (norm - 1) ** 2).backward()
        c.finish()


def closure(c: Case) -> tuple[Any, ...]:
    def evaluate() -> Tensor:
        c.optimizer.zero_grad()
        loss = c.loss(torch.bfloat16)
        loss.backward()
        return loss

    def loop() -> None:
        for _ in range(3):
            c.optimizer.step(evaluate)

    c.optimizer = torch.optim.LBFGS(c.net.parameters(), max_iter=3)
    return loop, c.optimizer


def checkpointed(c: Case) -> None:
    inner = c.net[1:]
    for reentrant in (True, False):
        for _ in c.each():
            c.optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                out = checkpoint(inner, c.net[0](c.batch[0]), use_reentrant=reentrant)
                loss = F.cross_entropy(out.float(), c.batch[1])
            c.scaler.scale(loss).backward()
            c.finish()


def compiled(c: Case) -> None:
    network = torch.compile(c.net, backend="eager", fullgraph=True)
    for _ in c.each():
        c.optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(network(c.batch[0]).nan_to_num().float(), c.batch[1])
        c.scaler.scale(loss).backward()
        c.finish()


def step_in_the_backward_pass(c: Case) -> tuple[Any, ...]:
    each = {p: torch.optim.SGD([p], 0.1) for p in c.net.parameters()}

    def update(p: Tensor) -> None:
        each[p].step()
        each[p].zero_grad()

    def loop() -> None:
        for p in each:
            p.register_post_accumulate_grad_hook(update)
        for _ in c.each():
            c.loss(torch.bfloat16).backward()

    return loop, list(each.values())


def scaler_of_mpkit(c: Case) -> tuple[Any, ...]:
    from mpkit.scalers import DynamicLossScaler, all_finite

    c.scaler = DynamicLossScaler(2**10, 2, 50)

    def loop() -> None:
        for _ in c.each():
            c.optimizer.zero_grad()
            c.scaler.scale(c.loss()).backward()
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
        for _ in c.each():
            cell(*c.batch)

    return loop, c.optimizer


FUNCTIONS_RIGHT = [
    two_losses, tasks_in_a_row, with_a_rest, gan, critic_more_often, gradient_penalty, gradient_penalty_flat, closure,
    checkpointed, compiled, step_in_the_backward_pass, scaler_of_mpkit, cell_of_mpkit,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("loop", FUNCTIONS_RIGHT, ids=lambda f: f.__name__)
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
@pytest.mark.parametrize(("before", "loop"), [RIGHT[i] for i in (0, 3, 4, 9)])
@pytest.mark.filterwarnings("ignore:Detected call of")
def test_right_loops_with_other_kernels(before, loop, kind, options):
    assert watched(Case(optimizer=kind, **options), loop, before).findings == []


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize(("mistake", "before", "loop"), [WRONG[i] for i in (0, 1, 7, 14, 25)])
def test_wrong_loops_with_a_fused_optimizer(mistake, before, loop):
    report = watched(Case(optimizer=torch.optim.Adam, fused=True), loop, before)
    assert [f.mistake for f in report.findings] == [mistake], str(report)


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
        for _ in c.each():
            with accelerator.accumulate(network):
                accelerator.backward(F.cross_entropy(network(c.batch[0]), c.batch[1]))
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
    seen, bare = Case(), Case()
    with watch_loop(seen.net, seen.optimizer, seen.scaler):
        seen.run(RIGHT[4][1])
    bare.run(RIGHT[4][1])
    for a, b in zip(seen.net.parameters(), bare.net.parameters()):
        assert torch.equal(a, b)
    assert [getattr(owner, name) for owner, name in names] == before
    assert "nan_to_num_" not in vars(torch.Tensor)


def test_an_error_in_the_loop_gets_the_report():
    c = Case()
    with pytest.raises(AssertionError) as caught, watch_loop(c.net, c.optimizer, c.scaler):
        c.run("clear scaled bare update")
    assert any("bare_step" in note for note in caught.value.__notes__)
    c.run(RIGHT[0][1])  # and torch is as it was


def test_an_optimizer_that_was_not_named_is_seen():
    c = Case()
    first, second = (torch.optim.SGD(c.net[i].parameters(), 0.1) for i in (0, 2))
    with watch_loop(c.net, first) as report:
        for _ in c.each():
            first.zero_grad()
            c.loss(torch.bfloat16).backward()
            first.step()
            second.step()
    assert [(f.mistake, f.where.split(",")[0]) for f in report.findings] == [("not_cleared", "optimizer 2 (SGD)")]


def test_a_loop_outside_of_the_block_is_not_seen():
    c = Case()
    with watch_loop(c.net, c.optimizer) as report:
        pass
    assert "inside the `with` block" in str(report)
    c.run(WRONG[0][2])
    assert (report.findings, report.steps) == ([], 0)


@pytest.mark.parametrize("wrong", [("net", None), (None, "optimizer"), ("net", "optimizer", 1024.0), ([], "optimizer")])
def test_wrong_arguments(wrong):
    c = Case()
    known = {"net": c.net, "optimizer": c.optimizer}
    with pytest.raises(TypeError, match="must"):
        watch_loop(*(known.get(w, w) if isinstance(w, str) else w for w in wrong))
