"""`watch_loop` names every mistake of a loop, with the line that mends it, and is silent on loops that are right."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts
from torch.utils.checkpoint import checkpoint

from mpkit.casting import auto_mixed_precision
from mpkit.diagnose import LoopReport, watch_loop
from mpkit.diagnose.words import MISTAKES
from mpkit.scalers import DynamicLossScaler, all_finite
from mpkit.step import TrainOneStepWithLossScaleCell, WithLossCell

Scaler = torch.amp.GradScaler


class Case:
    """A network of two layers with batches, an optimizer, a scaler and a schedule.

    A loop is a text: its words, `WORDS` and methods, run for each batch, those behind "3:" for every third alone, and
    with the number behind a "/".
    """

    def __init__(self, optimizer: Callable[..., Any] = torch.optim.SGD, network: Any = None, **options: Any):
        torch.manual_seed(0)
        self.net = network or nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        self.optimizer = optimizer(self.net.parameters(), **({"lr": 0.05} | options))
        self.scaler = Scaler("cpu", init_scale=2.0**10)
        self.batches = [(torch.randn(4, 6), torch.randint(3, (4,))) for _ in range(6)]
        self.batch = self.batches[0]
        self.optimizers = [self.optimizer]

    def each(self) -> Iterator[int]:
        for i, batch in enumerate(self.batches):
            self.batch = batch
            yield i

    def say(self, words: str, i: int = 2) -> None:
        for word in words.split():
            if i % 3 == 2 or not word.startswith("3:"):
                name, *number = word.removeprefix("3:").split("/")
                (WORDS.get(name) or getattr(Case, name))(self, *map(float, number))

    def run(self, loop: str) -> None:
        for i in self.each():
            self.say(loop, i)

    def loss(self, dtype: torch.dtype = torch.float16, reduction: str = "mean") -> Tensor:
        with torch.autocast("cpu", dtype):
            return F.cross_entropy(self.net(self.batch[0]).float(), self.batch[1], reduction=reduction)

    def squares(self) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return ((self.net(self.batch[0]) - F.one_hot(self.batch[1], 3)) ** 2).mean()

    def change(self, function: Callable[[Tensor], Any]) -> None:
        for p in self.net.parameters():
            if p.grad is not None:
                function(p.grad)

    def agc(self) -> None:
        """Adaptive gradient clipping: each gradient at most a hundredth of its weight."""
        for p in self.net.parameters():
            p.grad.mul_((0.01 * p.detach().norm() / p.grad.norm()).clamp(max=1))

    def inside(self, dtype: torch.dtype, word: str) -> None:
        with torch.autocast("cpu", dtype):
            self.say(word)

    def two(self) -> None:
        self.optimizers = [torch.optim.SGD(self.net[i].parameters(), 0.1) for i in (0, 2)]
        self.optimizer = self.optimizers[0]

    def two_scalers(self) -> None:
        self.two()
        self.pairs = [(optimizer, Scaler("cpu", init_scale=2.0**10)) for optimizer in self.optimizers]
        self.scaler = self.pairs[1][1]

    def next_pair(self) -> None:
        self.optimizer, self.scaler = self.pairs[0]
        self.pairs.reverse()

    # --- backward passes and steps of more than a line

    def forward(self, network: Callable[[Tensor], Tensor]) -> None:
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(network(self.batch[0]).float(), self.batch[1])
        self.scaler.scale(loss).backward()

    def two_losses(self) -> None:
        loss = self.loss()
        self.scaler.scale(loss).backward(retain_graph=True)
        self.scaler.scale(loss**2).backward()

    def tasks_in_a_row(self) -> None:
        for loss in (self.loss(), self.loss() ** 2):
            self.scaler.scale(loss).backward(retain_graph=True)

    def penalty(self, divided: Callable[[Tensor], Tensor]) -> None:
        loss = self.loss()
        grads = torch.autograd.grad(self.scaler.scale(loss), list(self.net.parameters()), create_graph=True)
        norm = torch.stack([divided(g).pow(2).sum() for g in grads]).sum().sqrt()
        self.scaler.scale(loss + 1e-3 * norm).backward()

    def penalty_flat(self) -> None:
        loss = self.loss()
        grads = torch.autograd.grad(self.scaler.scale(loss), list(self.net.parameters()), create_graph=True)
        norm = torch.cat([g.flatten() for g in grads]).norm() / self.scaler.get_scale()
        self.scaler.scale(loss + (norm - 1) ** 2).backward()

    def lbfgs(self) -> None:
        self.optimizers = [torch.optim.LBFGS(self.net.parameters(), max_iter=3)]
        self.optimizer = self.optimizers[0]

    def closure(self, dtype: torch.dtype = torch.bfloat16) -> None:
        def evaluate() -> Tensor:
            self.optimizer.zero_grad()
            loss = self.loss(dtype)
            loss.backward()
            return loss

        self.optimizer.step(evaluate)

    def in_the_backward_pass(self) -> None:
        def update(p: Tensor) -> None:
            each[p].step()
            each[p].zero_grad()

        each = {p: torch.optim.SGD([p], 0.1) for p in self.net.parameters()}
        self.optimizers = list(each.values())
        for p in each:
            p.register_post_accumulate_grad_hook(update)

    def gan(self) -> None:
        self.maker, self.judge = nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.net = nn.ModuleList([self.maker, self.judge])
        self.optimizers = [torch.optim.Adam(part.parameters()) for part in self.net]

    def judged(self, x: Tensor, right: float) -> None:
        with torch.autocast("cpu", torch.float16):
            loss = F.binary_cross_entropy_with_logits(self.judge(x).float(), torch.full((4, 1), right))
        self.scaler.scale(loss).backward()

    def gan_step(self) -> None:
        """The order of torch's DCGAN tutorial: gradients of the judge are cleared just before its own passes."""
        fake = self.maker(torch.randn(4, 4))
        self.judge.zero_grad()
        self.judged(self.batch[0], 1.0)
        self.judged(fake.detach(), 0.0)
        self.scaler.step(self.optimizers[1])
        self.maker.zero_grad()
        self.judged(fake, 1.0)
        self.scaler.step(self.optimizers[0])
        self.scaler.update()

    def critic_step(self) -> None:
        """A critic with a gradient penalty on its input takes many steps before the generator takes one."""
        self.optimizers[1].zero_grad()
        fake = self.maker(torch.randn(4, 4)).detach()
        between = (self.batch[0] + fake).requires_grad_()
        out = self.judge(between)
        (slope,) = torch.autograd.grad(out, between, torch.ones_like(out), create_graph=True)
        loss = self.judge(fake).mean() - self.judge(self.batch[0]).mean() + 10 * ((slope.norm(2, 1) - 1) ** 2).mean()
        loss.backward()
        self.optimizers[1].step()

    def scaler_of_mpkit(self) -> None:
        self.scaler = DynamicLossScaler(2**10, 2, 50)

    def step_of_mpkit(self) -> None:
        grads = self.scaler.unscale([p.grad for p in self.net.parameters()])
        for p, grad in zip(self.net.parameters(), grads):
            p.grad = grad
        finite = all_finite(grads)
        if finite:
            self.optimizer.step()
        self.scaler.adjust(finite)

    def cell_of_mpkit(self) -> None:
        whole = WithLossCell(self.net, nn.CrossEntropyLoss())
        self.cell = TrainOneStepWithLossScaleCell(whole, self.optimizer, torch.tensor(1024.0))


WORDS: dict[str, Callable[[Case], Any]] = {
    # the backward pass
    "scaled": lambda c, by=1: c.scaler.scale(c.loss() / by).backward(),
    "scaled_sums": lambda c: c.scaler.scale(c.loss(reduction="sum") / 12).backward(),
    "scaled_inside": lambda c: c.inside(torch.float16, "scaled"),
    "unscaled": lambda c: c.loss().backward(),
    "bfloat16": lambda c, by=1: (c.loss(torch.bfloat16) / by).backward(),
    "bfloat16_sums": lambda c: c.loss(torch.bfloat16, "sum").backward(),
    "bfloat16_squares": lambda c: c.squares().backward(),
    "float32": lambda c: F.cross_entropy(c.net(c.batch[0]), c.batch[1]).backward(),
    "checkpointed": lambda c: c.forward(lambda x: checkpoint(c.net[1:], c.net[0](x), use_reentrant=False)),
    "reentrant": lambda c: c.forward(lambda x: checkpoint(c.net[1:], c.net[0](x), use_reentrant=True)),
    "compiled": lambda c: c.forward(torch.compile(c.net, backend="eager", fullgraph=True)),
    "scaled_penalty": lambda c: c.penalty(lambda g: g),
    "unscaled_penalty": lambda c: c.penalty(lambda g: g * torch.ones_like(g) * (1.0 / c.scaler.get_scale())),
    "by_hand": lambda c, by=1024: (c.loss() * by).backward(),
    "by_a_tensor": lambda c: (torch.tensor(1024.0) * c.loss()).backward(),
    "by_a_seed": lambda c: c.loss().backward(torch.tensor(1024.0)),
    "quarter": lambda c: (c.loss(torch.bfloat16) * 0.25).backward(),
    "weighted": lambda c: [(c.loss(torch.bfloat16) * w).backward() for w in (0.5, 0.7)],
    "only_looked_at": lambda c: torch.autograd.grad(c.scaler.scale(c.loss()), [*c.net.parameters()]),
    "third_by_hand": lambda c: (c.loss() * 1024 / 3).backward(),
    "no_gradient": lambda c: c.scaler.scale((c.loss() - 100).relu()).backward(),  # a hinge: the margin is kept
    # what is done to gradients
    "clear": lambda c: c.optimizer.zero_grad(),
    "clear_all": lambda c: c.net.zero_grad(),
    "zeros": lambda c: c.optimizer.zero_grad(set_to_none=False),
    "zeros_by_hand": lambda c: c.change(lambda g: g.data.zero_()),
    "zeros_if_inf": lambda c: c.net[0].weight.grad.isfinite().all() or c.say("zeros"),
    "zero_row": lambda c: c.net[0].weight.grad[0].zero_(),
    "unscale": lambda c: c.scaler.unscale_(c.optimizer),
    "clip": lambda c: clip_grad_norm_(c.net.parameters(), 0.01),
    "clip_value": lambda c: clip_grad_value_(c.net.parameters(), 0.01),
    "clip_by_hand": lambda c: c.change(lambda g: g.data.clamp_(-0.5, 0.5)),
    "divide": lambda c, by=3: c.change(lambda g: g.div_(by)),
    "replace": lambda c: [setattr(p, "grad", p.grad / 3 / 1.7) for p in c.net.parameters()],
    "no_nan": lambda c: c.change(lambda g: g.nan_to_num_(0.0, 0.0, 0.0)),
    "no_nan_out_of_place": lambda c: [setattr(p, "grad", torch.nan_to_num(p.grad)) for p in c.net.parameters()],
    "no_nan_in_data": lambda c: c.change(lambda g: g.data.nan_to_num_()),
    "log": lambda c: c.batch[0].nan_to_num(),
    "no_nan_by_index": lambda c: c.change(lambda g: g.masked_fill_(~g.isfinite(), 0)),
    "freeze_ends": lambda c: [p.requires_grad_(False) for p in (c.net[0].weight, c.net[2].bias)],
    # the step and what comes after
    "step": lambda c: c.scaler.step(c.optimizer),
    "bare": lambda c: c.optimizer.step(),
    "bare_both": lambda c: [part.step() for part in c.optimizers],
    "step_both": lambda c: [(c.scaler.unscale_(part), c.scaler.step(part)) for part in c.optimizers],
    "rest": lambda c: any(c.batch is c.batches[i] for i in (3, -1)) and c.say("bare clear"),
    "bare_inside": lambda c: c.inside(torch.bfloat16, "bare"),
    "step_if_finite": lambda c: clip_grad_norm_(c.net.parameters(), 1.0).isfinite() and c.say("step"),
    "update": lambda c: c.scaler.update(),
    "higher_rate": lambda c: [group.update(lr=group["lr"] + 0.01) for group in c.optimizer.param_groups],
    "halve": lambda c: c.scaler.update(c.scaler.get_scale() / 2),
    "other_scaler": lambda c, scale=2.0**10: setattr(c, "scaler", Scaler("cpu", init_scale=scale)),
    "schedule_step": lambda c: c.schedule.step(),
    "late_schedule": lambda c: any(c.batch is b for b in c.batches[2:]) and c.schedule.step(),
    "epoch_schedule": lambda c: c.batch is c.batches[-1] and c.schedule.step(),
    "cell_step": lambda c: c.cell(*c.batch),
    "predict": lambda c: torch.no_grad()(c.net)(c.batch[0]),
    "predict_inside": lambda c: c.inside(torch.float16, "predict"),
    "closure_in_float16": lambda c: c.closure(torch.float16),
    # before the loop; the first lets its first steps overflow
    "overflowing": lambda c: c.scaler.load_state_dict(c.scaler.state_dict() | {"scale": 2.0**20}),
    "scheduled": lambda c: setattr(c, "schedule", CosineAnnealingWarmRestarts(c.optimizer, 100)),
    "hooked": lambda c: [p.register_hook(lambda g: torch.nan_to_num(g)) for p in c.net.parameters()],
    "clears_itself": lambda c: c.optimizer.register_step_post_hook(lambda optimizer, *_: optimizer.zero_grad()),
    "at_O2": lambda c: auto_mixed_precision(c.net, "O2", torch.float16),
    "long": lambda c: c.batches.extend(c.batches * 3),
    "short": lambda c: setattr(c, "batches", c.batches[:2]),
    "once": lambda c: setattr(c, "batches", c.batches[:1]),
    "freeze": lambda c: c.net.requires_grad_(False),
    "thaw": lambda c: c.net.requires_grad_(True),
    "one_weight": lambda c: c.__init__(network=nn.Linear(6, 3, bias=False)),
    "disabled": lambda c: setattr(c, "scaler", Scaler("cpu", enabled=False)),
}
Loop = tuple[str, str, str]  # the mistake, words before the loop, and the loop
WRONG: list[Loop] = [
    ("not_cleared", "", "scaled step update"),
    ("not_cleared", "", "scaled unscale clip step update"),  # kekmodel/MPL-pytorch#38
    ("cleared_early", "", "scaled clear step update"),
    ("cleared_early", "", "scaled zeros step update"),
    ("no_update", "", "clear scaled step"),
    ("no_update", "", "clear scaled unscale step"),
    ("no_update", "", "3:clear 3:scaled 3:step"),
    ("update_per_micro_batch", "", "scaled/3 3:step 3:clear update"),
    ("update_per_micro_batch", "", "scaled/3 3:step update 3:clear"),  # NVIDIA/apex#439, pytorch/pytorch#36601
    ("bare_step", "", "clear scaled bare"),  # princeton-vl/RAFT#104
    ("bare_step", "", "clear scaled bare update"),
    ("bare_step", "", "clear scaled unscale bare update"),
    ("unscaled_backward", "", "clear unscaled step update"),
    ("no_scaler", "", "clear unscaled bare"),
    ("unscale_per_micro_batch", "", "scaled/3 unscale 3:step 3:update 3:clear"),  # microsoft/Swin-Transformer#311
    ("unscale_per_micro_batch", "", "scaled/3 unscale 3:step 3:clear update"),
    ("clip_before_unscale", "", "clear scaled clip step update"),
    ("clip_before_unscale", "", "scaled clip step update clear"),  # milesial/Pytorch-UNet#468, pytorch/examples#1196
    ("clip_before_unscale", "", "clear scaled agc step update"),  # andreped/GradientAccumulator#19
    ("clip_before_unscale", "", "clear scaled clip_value unscale step update"),  # TorchSSL/TorchSSL#59
    ("clip_before_unscale", "", "clear scaled clip_by_hand step update"),
    ("clip_before_unscale", "", "scaled/3 clip 3:step 3:update 3:clear"),
    ("nan_hidden", "", "clear scaled no_nan step update"),
    ("nan_hidden", "", "clear scaled no_nan_out_of_place step update"),
    ("nan_hidden", "overflowing", "clear scaled no_nan_by_index step update"),
    ("nan_hidden", "hooked", "clear scaled step update"),
    ("inside_autocast", "", "clear scaled_inside step update"),  # pytorch/pytorch#120376
    ("inside_autocast", "", "clear bfloat16 bare_inside"),
    ("new_scaler", "", "clear scaled step update 3:other_scaler"),
    ("schedule_counts_skips", "overflowing scheduled", "clear scaled unscale step update schedule_step"),  # torch#55585
    ("schedule_counts_skips", "overflowing scheduled", "clear scaled step schedule_step update"),  # torch#44511
    ("schedule_counts_skips", "overflowing", "higher_rate clear scaled step update"),
    ("not_divided", "", "scaled 3:unscale 3:clip 3:step 3:update 3:clear"),
    ("not_divided", "", "bfloat16_squares 3:bare 3:clear"),
    ("idle_optimizer", "two", "clear_all scaled step update"),
    ("scaled_penalty", "", "scaled_penalty step update clear"),
    ("no_scaler", "", "closure_in_float16"),
    ("no_scaler", "at_O2", "clear float32 bare"),
    ("not_cleared", "", "freeze_ends bfloat16 bare"),
    ("not_cleared", "freeze", "thaw bfloat16 bare"),
    ("cleared_early", "overflowing", "scaled clear step update"),
    ("nan_hidden", "overflowing", "clear scaled zeros_if_inf step update"),
    ("nan_hidden", "", "clear scaled no_nan_in_data step update"),
    ("nan_hidden", "one_weight hooked", "clear scaled step update"),
    ("clip_before_unscale", "", "clear scaled divide/1.5 step update"),
    ("clip_before_unscale", "other_scaler/4096", "clear scaled divide/1024 step update"),
    ("schedule_counts_skips", "short overflowing scheduled", "clear scaled unscale step update schedule_step"),
    ("idle_optimizer", "short two", "clear_all scaled step update"),
    ("not_divided", "", "bfloat16 bfloat16 bare clear"),
    ("not_divided", "", "bfloat16/2 3:bare 3:clear"),
    ("no_scaler", "", "clear by_hand/7.9 bare"),
    ("not_cleared", "two", "clear bfloat16 bare_both"),  # the second of them
]


def watched(c: Case, loop: str, before: str = "", given: bool = True) -> LoopReport:
    """The report on a loop, which may end in an error."""
    c.say(before)
    scaler = c.scaler if given else None
    with contextlib.suppress(AssertionError, RuntimeError), watch_loop(c.net, c.optimizers, scaler) as report:
        c.run(loop)
    return report


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("fused", [False, True], ids=["scaler given", "scaler found, fused"])
@pytest.mark.parametrize(("mistake", "before", "loop"), WRONG)
def test_a_wrong_loop_is_named(mistake, before, loop, fused):
    c = Case(torch.optim.Adam, fused=True) if fused else Case()
    report = watched(c, loop, before, given=not fused)
    (found,) = report.findings
    assert found.mistake == mistake, str(report)
    assert found.advice == MISTAKES[found.mistake]
    kind, first = type(c.optimizer).__name__, {"not_cleared": 2, "no_update": 2, "new_scaler": 4}
    name = f"optimizer 2 ({kind})" if "two" in before else kind
    end = mistake in ("idle_optimizer", "schedule_counts_skips")
    where = f"{name}, step {report.steps if end else first.get(mistake, 1)}, line N of test_watch_loop.py"
    assert re.sub(r"line \d+", "line N", found.where) == where
    assert str(report).endswith(f" watched:\n  {mistake}: {found.where}: {found.advice}")


def test_every_mistake_has_a_loop():
    assert {mistake for mistake, *_ in WRONG} == set(MISTAKES)
    assert all("(" in advice or "`" in advice for advice in MISTAKES.values())  # a line that mends it


# --- loops that are right: words before them, and the loop

RIGHT: list[tuple[str, str]] = [
    ("", "clear scaled step update"), ("", "scaled unscale clip step update zeros"),
    ("", "zeros_by_hand scaled step update"), ("", "clear scaled unscale clip_value clip step update"),
    ("", "scaled/3 3:unscale 3:clip 3:step 3:update 3:clear"), ("", "scaled_sums 3:step 3:update 3:clear"),
    ("", "scaled 3:divide 3:step 3:update 3:clear"), ("", "bfloat16/3 3:bare 3:clear"),
    # ("", "quarter rest"): four micro-batches, and a rest of two
    ("", "bfloat16 3:divide 3:clip 3:bare 3:clear"), ("", "quarter rest"),
    ("overflowing", "clear scaled step update"),
    ("overflowing scheduled", "clear scaled step update 3:schedule_step"),
    ("overflowing", "clear scaled unscale step_if_finite update"), ("", "clear by_hand divide/1024 clip bare"),
    ("", "clear float32 bare"), ("disabled", "clear bfloat16 unscale clip step update"),
    ("", "clear scaled zero_row step update"), ("two", "clear_all scaled step_both update"),
    ("", "clear two_losses step update"), ("", "clear tasks_in_a_row step update"),
    ("", "clear unscaled_penalty step update"), ("", "clear penalty_flat step update"),
    ("", "clear checkpointed step update"), ("", "clear reentrant step update"), ("", "clear compiled step update"),
    ("lbfgs", "closure"), ("in_the_backward_pass", "bfloat16"), ("gan", "gan_step"), ("gan", "critic_step"),
    ("scaler_of_mpkit", "clear scaled step_of_mpkit"), ("cell_of_mpkit", "cell_step"),
    ("long two_scalers", "next_pair clear_all scaled step update"),
    ("", "clear no_gradient unscale clip step update"),
    ("overflowing", "clear scaled unscale zeros_if_inf step update"), ("", "predict_inside clear bfloat16 bare"),
    ("", "third_by_hand 3:divide/1024 3:bare 3:clear"), ("clears_itself", "bfloat16 bare"),
    ("", "clear scaled unscale float32 step update"),
    ("short overflowing scheduled", "clear scaled step update epoch_schedule"),
    ("overflowing scheduled", "clear scaled step update late_schedule"),
    ("scheduled", "clear scaled step update schedule_step"), ("scheduled", "clear scaled step halve schedule_step"),
    ("once two", "clear_all scaled step update"),
    ("long", "clear by_hand/8 bare clear by_a_tensor divide/1024 bare clear by_a_seed divide/1024 bare"),
    ("", "clear scaled divide/1024 bare"), ("other_scaler/4096", "clear scaled divide/1023 step update"),
    ("", "scaled clear scaled step update clear"),
    ("", "clear only_looked_at scaled step update clear scaled log step update"),
    ("", "bfloat16_sums 3:bare 3:clear"),
    ("", "bfloat16/0.3 clip bare clear weighted bare clear bfloat16 bfloat16 replace bare clear"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize(("before", "loop"), RIGHT)
def test_a_right_loop_has_no_finding(before, loop):
    report = watched(Case(), loop, before, given="mpkit" in before or "scalers" in before)
    assert report.findings == [], str(report)
    assert report.steps >= 2 - ("once" in before)
    assert "no mistake" in str(report)


@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.SGD, {"foreach": True}), (torch.optim.Adam, {"fused": True}), (torch.optim.AdamW, {"foreach": True})],
)
@pytest.mark.parametrize(("before", "loop"), [RIGHT[i] for i in (0, 3, 4, 10, 40)])
@pytest.mark.filterwarnings("ignore:Detected call of")
def test_right_loops_with_other_kernels(before, loop, kind, options):
    assert watched(Case(optimizer=kind, **options), loop, before).findings == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("precision", "by_hand"), [("bf16-mixed", False), ("32-true", False), ("bf16-mixed", True)])
def test_the_loop_of_lightning_has_no_finding(precision, by_hand, tmp_path):
    lightning = pytest.importorskip("lightning.pytorch", reason="pip install lightning: its loop is what is watched")
    c = Case()

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.automatic_optimization = c.net, not by_hand

        def training_step(self, batch: Any, _index: int) -> Tensor:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            if by_hand:  # still inside the autocast of Lightning
                self.optimizers().zero_grad()
                self.manual_backward(loss)
                self.optimizers().step()
            return loss

        def configure_optimizers(self) -> Any:
            return [c.optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(c.optimizer, 1), "interval": "step"}]

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, precision=precision, max_epochs=1, accumulate_grad_batches=1 if by_hand else 2,
        gradient_clip_val=None if by_hand else 0.1, default_root_dir=tmp_path, **quiet,
    )  # fmt: skip
    with watch_loop(c.net, c.optimizer) as report:
        trainer.fit(Module(), torch.utils.data.DataLoader(c.batches, batch_size=None))
    assert (report.findings, report.steps) == ([], 6 if by_hand else 3), str(report)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scaled", [False, True])
def test_the_loop_of_accelerate_has_no_finding(scaled):
    accelerate = pytest.importorskip("accelerate", reason="pip install accelerate: its loop is what is watched")
    c = Case()
    accelerate.state.AcceleratorState._reset_state(True)
    precision = "no" if scaled else "bf16"
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
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


@pytest.mark.parametrize(
    ("usual", "odd", "seen"),
    [
        ("clear scaled step update", "clear scaled clip step update", {1, 9, 10, 11, 20, 21}),
        ("clear bfloat16 bare", "clear unscaled bare", {10, 20}),  # the graph of a loss may be large
    ],
)
def test_after_ten_steps_two_in_ten_are_looked_at(usual, odd, seen):
    found = set()
    for one in (1, 9, 10, 11, 12, 19, 20, 21, 22):
        c = Case()
        c.say("long")
        with watch_loop(c.net, c.optimizer) as report:
            for i in c.each():
                c.say(odd if i == one else usual)
        found |= {one} if report.findings else set()
    assert found == seen


def test_another_scaler_than_the_one_given_is_new():
    c = Case()
    with watch_loop(c.net, c.optimizer, Scaler("cpu")) as report:
        c.run(RIGHT[0][1])
    assert [(f.mistake, f.where.split(",")[1]) for f in report.findings] == [("new_scaler", " step 1")]


# --- what watching leaves behind


def test_the_training_is_the_same_and_nothing_stays():
    names = [(torch.autograd, "backward"), (torch.autograd, "grad"), (Tensor, "nan_to_num_"), (torch, "nan_to_num")]
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


def test_a_loop_outside_of_the_block_is_not_seen():
    c = Case()
    with watch_loop(c.net, c.optimizer) as report:
        pass
    assert "inside the `with` block" in str(report)
    c.run(WRONG[0][2])
    assert (report.findings, report.steps) == ([], 0)
