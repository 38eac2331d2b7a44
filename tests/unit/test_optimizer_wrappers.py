"""An optimizer around another: hooks and state of the one inside, and bfloat16 weights without a master copy."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from stepping import stepped
from support import AGAIN, again
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

from mpkit import optimizers as opt
from mpkit.boost import FreezeOpt
from mpkit.optimizers import BFloat16Weights, stochastic_bf16

WAYS = ("stochastic", "kahan")


def wrapped(kind: str) -> opt.Wrapper:
    weights = [nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(3)]
    inside = opt.Momentum(weights, 0.5, 0.5)
    if kind == "two":
        return opt.Wrapper(opt.Wrapper(inside))
    return {"plain": opt.Wrapper, "LARS": opt.LARS, "bf16": BFloat16Weights}[kind](inside)


@pytest.mark.parametrize("kind", ["plain", "two", "LARS", "bf16"])
def test_hooks_run_once_whichever_object_they_were_given_to(kind):
    optimizer, seen = wrapped(kind), []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    handle = register_optimizer_step_post_hook(lambda *_: seen.append("any"))
    try:
        stepped(optimizer)
    finally:
        handle.remove()
    assert (seen, optimizer.global_step) == (["before", "after", "any"], 1)


@pytest.mark.parametrize("kind", ["plain", "LARS", "bf16"])
def test_schedulers_of_either_object_see_its_steps(kind):
    optimizer = wrapped(kind)
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 1, 0.5) for one in (optimizer, optimizer.optimizer)]
    stepped(optimizer)
    for scheduler in schedulers:
        scheduler.step()  # torch would warn of one whose optimizer made no step
    assert copy.deepcopy(optimizer).param_groups[0]["lr"] == optimizer.optimizer.param_groups[0]["lr"] == 0.125


def test_a_wrapper_that_is_being_made_has_nothing_inside():
    assert not hasattr(opt.Wrapper.__new__(opt.Wrapper), "state")


@pytest.mark.parametrize("fused", [True, False])
def test_torch_s_scaler_divides_for_an_optimizer_inside_that_does_not(fused):
    weight, scaler = nn.Parameter(torch.ones(2)), torch.amp.GradScaler("cpu", 1024.0)
    optimizer = opt.Wrapper(torch.optim.SGD([weight], 0.5, fused=fused))
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    assert weight.tolist() == [0.5, 0.5]


def test_flags_of_a_scaler_are_handed_on_and_taken_away():
    optimizer = wrapped("plain")
    optimizer.found_inf = torch.ones(())
    stepped(optimizer)
    assert optimizer.global_step == 0
    assert not {"found_inf", "grad_scale"} & vars(optimizer.optimizer).keys()
    kinds = ("plain", "LARS", "bf16")  # the last would draw random bits in a skipped step
    assert [wrapped(kind)._step_supports_amp_scaling for kind in kinds] == [True, True, False]


class Peak(TorchDispatchMode):
    """The most bytes of float32 tensors that a block made and held at one time."""

    def __init__(self):
        super().__init__()
        self.held, self.most = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dtype is torch.float32:
            storage = out.untyped_storage()
            self.held[storage.data_ptr()] = storage.nbytes()
            weakref.finalize(storage, self.held.pop, storage.data_ptr(), None)
            self.most = max(self.most, sum(self.held.values()))
        return out


@pytest.mark.parametrize("way", WAYS)
def test_a_step_on_bfloat16_holds_float32_of_one_parameter_after_the_other(way):
    weights, lots = [nn.Parameter(torch.ones(n, dtype=torch.bfloat16)) for n in (*[1000] * 8, *[250] * 32)], []
    # the decay is asked for once in each lot
    optimizer = BFloat16Weights(
        opt.Momentum(weights, 0.5, 0.0, weight_decay=lambda step: lots.append(step) or 0.0), way
    )
    stepped(optimizer)
    with Peak() as peak:
        optimizer.step()
    assert len(lots) == 2 * 16  # not 40 a step: small ones are together
    assert 0 < peak.most <= 8 * 4 * 1000  # all at once would hold 16 weights and 16 gradients of 4000 bytes


def test_the_mean_is_exact_and_special_values_stay():
    x = torch.full((1 << 16,), 1 + 2.0**-9)  # a quarter of the gap 2^-7 above 1
    y = stochastic_bf16(x, torch.arange(1 << 16, dtype=torch.int32))
    assert set(y.tolist()) == {1.0, 1 + 2.0**-7}
    assert y.double().mean() == 1 + 2.0**-9  # every value of the 16 bits once: no luck in it
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0])
    payload = torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32)  # cut to 16 bits this would be inf
    assert stochastic_bf16(payload).isnan().all()
    assert str(stochastic_bf16(special).tolist()) == "[nan, inf, -inf, 0.0, -0.0]"


def drifted(way: str | None, steps: int = 2000, step: float = 1e-4) -> torch.Tensor:
    torch.manual_seed(0)
    start = (1 + torch.rand(512)).bfloat16()
    w = nn.Parameter(start.clone())
    inner = torch.optim.SGD([w], lr=step)
    optimizer = inner if way is None else BFloat16Weights(inner, way, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        w.grad = torch.ones_like(w)
        optimizer.step()
    return w.detach().double() - start.double()


def test_small_updates_arrive():
    assert drifted(None, 50).abs().max() == 0  # plain bfloat16 forgets them all
    assert (drifted("kahan", 500) + 0.05).abs().max() < 2.0**-8 + 500 * 2.0**-17  # half a gap of w, and of c each step
    one = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    kahan = BFloat16Weights(torch.optim.SGD([one], lr=2.0**-8), "kahan")
    for after in (1, 1 + 2.0**-7, 1 + 2.0**-6):  # half a gap is lost in a tie to even, and kept; then it is a whole one
        one.grad = -torch.ones_like(one)
        kahan.step()
        assert one.item() == after
    exact, noise = drifted("stochastic", 500).mean(), 2.0**-7 * (500 * 1e-4 / 2.0**-7 / 512) ** 0.5
    assert abs(exact + 0.05) < 4 * noise


@pytest.mark.filterwarnings("ignore")  # torch.compile has some of its own
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_compiled_kahan_step_keeps_what_rounding_lost(backend):
    torch.compiler.reset()
    w = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = BFloat16Weights(torch.optim.SGD([w], lr=2.0**-12), "kahan")
    step = torch.compile(optimizer.step, backend=backend)
    for _ in range(64):
        w.grad = torch.ones_like(w)
        step()
    assert set(w.tolist()) == {1 - 64 * 2.0**-12}
    torch.compiler.reset()


@pytest.mark.parametrize("before", [1000.0, -1000.0, 3.0e38])
@pytest.mark.parametrize("after", [0.0, 2.0**-7, -2.0])
def test_a_weight_that_somebody_writes_leaves_no_remainder_of_the_old_one(before, after):
    w = nn.Parameter(torch.tensor([before], dtype=torch.bfloat16))
    optimizer = BFloat16Weights(torch.optim.SGD([w], lr=1.0), "kahan")
    w.grad = torch.tensor([-1.0 if before > 0 else 1.0], dtype=torch.bfloat16) * abs(before) * 2.0**-9
    optimizer.step()
    if before > 3e38:  # past the largest number the weight is inf and what was lost NaN
        for _ in range(8):
            optimizer.step()
        assert w.isinf()
    with torch.no_grad():
        w.fill_(after)
    w.grad = torch.zeros_like(w)
    optimizer.step()
    assert w.item() == after


@pytest.mark.parametrize("kind", [torch.optim.AdamW, opt.Adam])
@pytest.mark.parametrize("how", AGAIN)
@pytest.mark.parametrize("way", WAYS)
def test_a_copy_or_a_resumed_run_trains_itself_on_the_same_bits(way, how, kind):
    def made(start: Tensor) -> BFloat16Weights:
        generator = torch.Generator().manual_seed(3)
        return BFloat16Weights(kind([nn.Parameter(start.detach().clone())], 1e-2), way, generator=generator)

    optimizer = made((1 + torch.rand(64)).bfloat16())
    (weight,) = optimizer.param_groups[0]["params"]
    for gradient in (0.1, -0.3, 0.2):
        stepped(optimizer, gradient)
    twin, before = again(optimizer, how, lambda: made(weight)), weight.detach().clone()
    for one in (twin, optimizer):
        assert torch.equal(weight, before)
        for gradient in (0.5, -0.1, 0.4):
            stepped(one, gradient)
    assert torch.equal(twin.param_groups[0]["params"][0], weight)
    assert weight.dtype is torch.bfloat16


def test_bad_input_is_refused_with_the_way_out():
    low = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    for wrong, error, words in (
        (lambda: BFloat16Weights([low]), TypeError, "torch.optim.Optimizer"),
        (lambda: BFloat16Weights(torch.optim.SGD([low]), "nearest"), ValueError, "kahan"),
        (lambda: BFloat16Weights(torch.optim.SGD([nn.Parameter(torch.ones(1))])), ValueError, "bfloat16"),
        (lambda: BFloat16Weights(torch.optim.LBFGS([low])), TypeError, "LBFGS calls the loss several times"),
        (lambda: BFloat16Weights(FreezeOpt(torch.optim.SGD([low]))), TypeError, "FreezeOpt knows its parameters"),
        (lambda: stochastic_bf16(low), TypeError, "float32"),
        (lambda: stochastic_bf16(torch.ones(2), torch.ones(1)), ValueError, "shape"),
    ):
        with pytest.raises(error, match=words):
            wrong()
    optimizer = BFloat16Weights(torch.optim.SGD([low]), "kahan")
    drawing = BFloat16Weights(torch.optim.SGD([low]), "kahan", generator=torch.Generator())
    drawing.load_state_dict(optimizer.state_dict()), optimizer.load_state_dict(drawing.state_dict())
    with pytest.raises(ValueError, match="needs 0 entries"):
        BFloat16Weights(torch.optim.SGD([low]), "stochastic").load_state_dict(optimizer.state_dict())


def bfloat16_weights(value: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.full((4,), value, dtype=torch.bfloat16))


@pytest.mark.parametrize("make", [opt.Adam, opt.AdaMax, opt.Lamb, opt.ASGD, opt.SGD], ids=lambda make: make.__name__)
def test_an_optimizer_of_ours_counts_its_steps_on_bfloat16_weights(make):
    torch.manual_seed(0)
    p = nn.Parameter((1 + torch.rand(64)).bfloat16())
    wide = nn.Parameter(p.detach().float())
    low, high = opt.BFloat16Weights(make([p], 1e-2), "kahan"), make([wide], 1e-2)
    for gradient in torch.randn(8, 64).bfloat16():
        p.grad, wide.grad = gradient, gradient.float()
        low.step()
        high.step()
    exact = p.detach().double() + low.state_dict()["lost"][0].double()
    # the wide run never rounds to bfloat16; Kahan's remainder keeps 16 bits, eight times
    assert (exact - wide.detach().double()).abs().max() < 8 * 2.0**-16 * 2
    assert low.optimizer.param_groups[0]["updates"] == low.state_dict()["inner"]["param_groups"][0]["updates"] == 8


@pytest.mark.parametrize("adds", [lambda o: o, lambda o: o.optimizer], ids=["outside", "inside"])
@pytest.mark.parametrize("way", WAYS)
def test_a_group_added_to_bfloat16_weights_is_trained_and_saved(way, adds):
    def made() -> opt.BFloat16Weights:
        optimizer = opt.BFloat16Weights(torch.optim.SGD([bfloat16_weights()], 0.5, momentum=0.5), way)
        adds(optimizer).add_param_group({"params": [bfloat16_weights(2.0)], "lr": 0.25})
        return optimizer

    optimizer, other = made(), made()
    stepped(optimizer)
    first, second = (group["params"][0] for group in optimizer.param_groups)
    assert (first.tolist(), second.tolist()) == ([0.5] * 4, [1.75] * 4)
    assert {p.dtype for p in (first, second)} == {torch.bfloat16}
    other.load_state_dict(optimizer.state_dict())
    stepped(other, 0.0)
    assert other.param_groups[1]["params"][0].tolist() == [2.0 - 0.25 * 0.5] * 4  # the momentum of the step before


def test_a_momentum_from_before_goes_on_in_bfloat16_weights():
    p, q = bfloat16_weights(), bfloat16_weights()
    inner, plain = (torch.optim.SGD([w], 0.5, momentum=0.5) for w in (p, q))
    stepped(inner)
    stepped(plain)
    stepped(opt.BFloat16Weights(inner, "kahan"))
    stepped(plain)
    assert p.tolist() == q.tolist() == [-0.25] * 4


def test_an_error_inside_leaves_bfloat16_weights_in_their_place():
    p = bfloat16_weights()
    optimizer = opt.BFloat16Weights(opt.Momentum([p], 1.0, 0.0, weight_decay=lambda step: 1 / 0), "kahan")
    with pytest.raises(ZeroDivisionError):
        stepped(optimizer)
    assert (optimizer.param_groups[0]["params"], p.tolist()) == ([p], [1.0] * 4)
