"""Record the traces in this folder: `python data/traces/make_traces.py [name ...]`, all of them without a name;
`what_if` trains the runs of lesson 04 under other policies, for the tests.

Every trace is a real training run on one CPU thread, recorded by `mpkit.record.Recorder` with the seed below. The
numbers of another machine differ in the last bits of the arithmetic, and with them a skipped step here or there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpkit import data
from mpkit.casting import auto_mixed_precision
from mpkit.formats import FP16, FloatFormat
from mpkit.networks import LeNet5, Network, TinyGPT, resnet18
from mpkit.policies import ScalePolicy, preset
from mpkit.record import Recorder, Trace
from mpkit.scalers import PolicyLossScaler
from mpkit.step import TrainOneStepWithLossScaleCell, WithLossCell

HERE = Path(__file__).parent
REALLY_TRAINED = HERE.parent.parent / "tests" / "golden" / "what_if"
SEED = 20
Batches = Iterator[tuple[Tensor, Tensor]]


def train(
    network: nn.Module,
    batches: Batches,
    policy: ScalePolicy,
    what: str,
    *,
    loss: nn.Module | None = None,
    level: str = "O2",
    dtype: torch.dtype | FloatFormat = torch.float16,
    lr: float = 0.05,
    every: int = 1,
    activations: bool = False,
    clip_norm: float | None = None,
) -> Trace:
    """Train one step per batch with SGD and momentum, and return what was recorded."""
    auto_mixed_precision(network, level, dtype)
    optimizer = torch.optim.SGD(network.parameters(), lr, momentum=0.9)
    scaler = PolicyLossScaler(policy, remember=0)
    meta = {"what": what, "level": level, "dtype": str(dtype), "seed": SEED, "made_by": "data/traces/make_traces.py"}
    form = "fp32" if level == "O0" else "fp16"
    recorder = Recorder(network, scaler=scaler, every=every, activations=activations, format=form, meta=meta)
    step = TrainOneStepWithLossScaleCell(
        WithLossCell(network, loss or nn.CrossEntropyLoss()), optimizer, scaler, hooks=[recorder], clip_norm=clip_norm
    )
    for inputs, target in batches:
        step(inputs, target)
    recorder.close()
    return recorder.trace()


def ceiling(network: nn.Module, loss: nn.Module, inputs: Tensor, target: Tensor, near: int) -> int | None:
    """The largest loss scale with finite gradients in float16 at O2, in quarters of a power of two; None: no scale.

    The search starts near the last step's answer. A scale that overflows still overflows when it is doubled.
    """
    half = auto_mixed_precision(deepcopy(network), "O2", torch.float16)
    value = loss(half(inputs), target)

    def finite(quarters: int) -> bool:
        seed = torch.tensor(2.0 ** (quarters / 4), dtype=value.dtype)
        grads = torch.autograd.grad(value, list(half.parameters()), seed, retain_graph=True)
        return all(bool(g.isfinite().all()) for g in grads)

    if not value.isfinite():
        return None
    low, high, width = near, near + 1, 1
    while not finite(low):
        if low < -160:
            return None
        low, high, width = low - width, low, 2 * width
    while finite(high):
        low, high, width = high, high + width, 2 * width
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if finite(middle) else (low, middle)
    return low


def in_float32(make: Callable[..., Trace]) -> Trace:
    """The run of `make` in float32 without a scale, with the ceiling that float16 would have had in each step."""
    found: list[int | None] = []

    def measured(network: nn.Module, batches: Batches, _policy: ScalePolicy, _what: str, **options: object) -> Trace:
        loss = options["loss"] = options.get("loss") or nn.CrossEntropyLoss()
        assert isinstance(loss, nn.Module)

        def watched() -> Batches:
            for inputs, target in batches:
                near = next((q for q in reversed(found) if q is not None), 64)
                found.append(ceiling(network, deepcopy(loss), inputs, target, near))
                yield inputs, target

        options |= {"level": "O0", "activations": False, "every": 1}
        name = getattr(make, "func", make).__name__
        told = f"{name} in float32 and without a scale, with the largest scale that float16 at O2 could bear"
        trace = train(network, watched(), UNSCALED, told, **options)  # type: ignore[arg-type]
        return replace(trace, measured={"fp16": np.array([-1.0 if q is None else 2.0 ** (q / 4) for q in found])})

    return make(measured)


UNSCALED = ScalePolicy.fixed(1.0)


def batches(images: Tensor, labels: Tensor, steps: int, size: int = 64) -> Batches:
    """`steps` random batches."""
    generator = torch.Generator().manual_seed(SEED)
    for _ in range(steps):
        chosen = torch.randint(len(images), (size,), generator=generator)
        yield images[chosen], labels[chosen]


def mlp_digits(train: Callable[..., Trace] = train, size: int = 64, lr: float = 0.05, steps: int = 400) -> Trace:
    return train(
        Network(),
        batches(*data.digits(), steps=steps, size=size),
        preset("torch", growth_interval=50),
        "784-512-512-10 perceptron on digits, float16 at O2, healthy: the scale climbs until it meets the ceiling",
        activations=True,
        lr=lr,
    )


class Squares(nn.Module):
    """A perceptron that squares its hidden values: fine in float32, out of range in float16 once they pass 256."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(784, 128)
        self.squared = nn.Linear(128, 128)
        self.out = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.hidden(x.flatten(1))) ** 2
        return self.out(F.relu(self.squared(x)) ** 2)


class Margin(nn.Module):
    """How far the right logit lies above the mean of all, to be made large: a loss without a lower bound."""

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return (logits.mean(1) - logits.gather(1, target[:, None])[:, 0]).mean()


def growing_activations(train: Callable[..., Trace] = train) -> Trace:
    return train(
        Squares(),
        batches(*data.digits(), steps=400),
        preset("torch", growth_interval=50),
        "perceptron with squared activations and a loss without a lower bound, on digits: the activations grow until "
        "a square overflows in the forward pass; from then on every step is skipped and the scale sinks to zero",
        loss=Margin(),
        lr=0.003,
        activations=True,
    )


class Outliers(nn.Module):
    """Cross-entropy of a mean over many outputs; every 16th batch holds a mislabelled outlier with a huge weight."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return F.cross_entropy(logits, target) * 2.0**-10 * (2.0**36 if self.calls % 16 == 0 else 1.0)


def rare_outliers(train: Callable[..., Trace] = train) -> Trace:
    return train(
        Network(),
        batches(*data.digits(), steps=500),
        preset("torch", growth_interval=2000),
        "perceptron on digits with a small loss and one huge batch in 16: an outlier that overflows halves the scale, "
        "nothing raises it again (growth_interval 2000), and the ordinary gradients flush to zero",
        loss=Outliers(),
        lr=10.0,
        every=2,
        clip_norm=0.005,
    )


def mlp_float32() -> Trace:
    return train(
        Network(),
        batches(*data.digits(), steps=300),
        UNSCALED,
        "784-512-512-10 perceptron on digits in float32 without scaling: what its gradients need of a format",
        level="O0",
        activations=True,
    )


def mnist_lenet() -> Trace:
    return train(
        LeNet5(),
        batches(*data.mnist(), steps=400),
        preset("deepspeed", scale_window=100),
        "LeNet-5 on MNIST, float16 emulated at O2, DeepSpeed's rule with a window of 100",
        dtype=FP16,
        every=2,
    )


def gpt_sums(train: Callable[..., Trace] = train) -> Trace:
    return train(
        TinyGPT(vocabulary=16, context=48),
        sums(steps=400),
        preset("mindspore_cell", loss_scale_value=2.0**24, scale_factor=2, scale_window=100),
        "small GPT on sums that it reads character by character ('17+5=22;...'), float16 at O2, "
        "MindSpore's update cell",
        loss=NextToken(),
        lr=0.1,
    )


class NextToken(nn.Module):
    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def sums(steps: int, size: int = 16, length: int = 48) -> Batches:
    """Batches of characters of a text of additions, and the characters that follow."""
    generator = torch.Generator().manual_seed(SEED)
    pairs = torch.randint(100, (4000, 2), generator=generator).tolist()
    text = "".join(f"{a}+{b}={a + b};" for a, b in pairs)
    tokens = torch.tensor(["0123456789+=;".index(c) for c in text])
    for _ in range(steps):
        starts = torch.randint(len(tokens) - length - 1, (size,), generator=generator)
        rows = torch.stack([tokens[s : s + length + 1] for s in starts.tolist()])
        yield rows[:, :-1], rows[:, 1:]


def resnet_digits() -> Trace:
    images, labels = data.digits(size=8)
    return train(
        resnet18(width=8, in_channels=1),
        batches(images, labels, steps=200, size=32),
        preset("megatron", growth_interval=50),
        "ResNet-18 of width 8 on 8x8 digits, float16 emulated at O2, Megatron-LM's rule starting at 2^32",
        dtype=FP16,
        every=4,
    )


def mlp_digits_float32() -> Trace:
    return in_float32(mlp_digits)


def mlp_digits_rate_float32() -> Trace:
    """Four times the learning rate, and nothing else."""
    return in_float32(partial(mlp_digits, lr=0.2, steps=200))


def mlp_digits_batch_float32() -> Trace:
    """An eighth of the batch, and nothing else."""
    return in_float32(partial(mlp_digits, size=8, steps=200))


def gpt_sums_float32() -> Trace:
    return in_float32(gpt_sums)


def rare_outliers_float32() -> Trace:
    return in_float32(rare_outliers)


def growing_activations_float32() -> Trace:
    return in_float32(growing_activations)


WHAT_IF = [  # (first scale, factor, window, floor), the first and the last as powers of two
    (16, 2.0, 400, -24),
    (16, 2.0, 10, -24),
    (24, 2.0, 50, 0),
    (0, 2.0, 5, 0),
    (16, 8.0, 20, 0),
]


def what_if(make: Callable[..., Trace]) -> None:
    """Really train the run of `make` in float16 under five policies, to test replays of the float32 run with."""
    runs = []
    for start, factor, window, floor in WHAT_IF:
        policy = ScalePolicy.by_factor(2.0**start, factor, window, 2.0**floor)

        def steered(
            network: nn.Module, batches: Batches, _policy: ScalePolicy, what: str, policy=policy, **options
        ) -> Trace:
            return train(network, batches, policy, what, **(options | {"activations": False, "every": 1}))

        torch.manual_seed(SEED)
        trace = make(steered)
        zeros = trace.gradients.zeros.sum(1) / trace.gradients.size.sum()
        runs.append(
            {
                "policy": {"init": start, "factor": factor, "window": window, "floor": floor},
                "exponent": np.log2(trace.scale).round(6).tolist(),
                "skipped": np.flatnonzero(trace.overflow).tolist(),
                "zeros": zeros.round(4).tolist(),
            }
        )
    REALLY_TRAINED.mkdir(parents=True, exist_ok=True)
    path = REALLY_TRAINED / f"{make.__name__}.json"
    path.write_text(json.dumps({"run": make.__name__, "made_by": "data/traces/make_traces.py", "runs": runs}) + "\n")
    print(f"{path.name}: skipped {[len(run['skipped']) for run in runs]}")


SHOWN = (mlp_digits, gpt_sums, rare_outliers, growing_activations)  # the runs of lesson 04
MAKERS: dict[str, Callable[[], Trace]] = {
    f.__name__: f
    for f in (
        mlp_digits,
        growing_activations,
        rare_outliers,
        mlp_float32,
        mnist_lenet,
        gpt_sums,
        resnet_digits,
        mlp_digits_float32,
        mlp_digits_rate_float32,
        mlp_digits_batch_float32,
        gpt_sums_float32,
        rare_outliers_float32,
        growing_activations_float32,
    )
}


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    for name in names or MAKERS:
        if name == "what_if":
            continue
        torch.manual_seed(SEED)
        trace = MAKERS[name]()
        trace.save(HERE / f"{name}.npz")
        print(f"{name}: {trace}, {(HERE / f'{name}.npz').stat().st_size // 1000} kB")
    if not names or "what_if" in names:
        for make in SHOWN:
            what_if(make)


if __name__ == "__main__":
    main(sys.argv[1:])
