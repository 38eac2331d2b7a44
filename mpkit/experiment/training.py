"""`train`: a ready-made run of `experiment`, in which every level, format, policy, boost and recipe has a name."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mpkit.arguments import check_count, check_flags
from mpkit.casting import Recipe
from mpkit.casting.low import map_tensors
from mpkit.device import default_device
from mpkit.experiment import parts
from mpkit.experiment.batches import batches_of, pair_of
from mpkit.optimizers.arguments import Rate
from mpkit.step import StepOutcome
from mpkit.step.build import widened

IGNORED = -100  # the label that torch's cross entropy leaves out, and so does the accuracy
WARM = 5  # steps that fill caches and buffers and are not timed


def train(
    network: parts.Builds = "Network",
    data: object = "digits",
    *,
    optimizer: parts.Optimizes = "Momentum",
    lr: Rate | None = 0.05,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    level: parts.Casts = "O0",
    dtype: parts.Dtype = "float16",
    scaler: parts.Scales | Callable[[nn.Module], parts.Scales] = None,
    boost: parts.Boosts = "O0",
    recipe: str | Recipe | None = None,
    epochs: int = 5,
    batch: int = 32,
    seed: int = 0,
    keep: bool = False,
) -> dict[str, Any]:
    """Train a network from one seed and measure it.

    Args:
        network:   what builds it: a class or function without arguments, the name of one in `mpkit.networks`
                   ("Network", "LeNet5", "TinyGPT").
        data:      "digits" (28x28), "digits8" (8x8), "mnist"; (x, y) or ((x, y), (test_x, test_y)) tensors or arrays;
                   a Dataset of samples (x, y); anything else that can be iterated for batches (x, y), a DataLoader say;
                   {"train": ..., "test": ...} of these; or a function that returns one of them. x and y may be nests
                   of tensors. Without test data the last fifth of (x, y), or a fixed fifth of a Dataset that can be
                   indexed, is kept for the test; what is only iterated is then not tested.
        optimizer: a name in `mpkit.optimizers`, "torch.Adam" for one of torch, or a function of the parameters.
        lr:        learning rate of an optimizer that has a name, or a schedule for mpkit's own; None: its default.
        loss:      (output, label) -> scalar; None: cross entropy for whole-number labels, else the mean squared error.
        level:     "O0" to "O3", "auto", a preset of `cast_like` such as "torch_autocast", or a function of the network.
        dtype:     "float16" and "bfloat16" are the native types; the name of a format ("fp16", "e5m2", "e4m7") or a
                   `FloatFormat` is emulated, which on a CPU is the faster way for convolutions.
        scaler:    None: no loss scaling; a number: a static scale; "dynamic": MindSpore's; a framework's name of
                   `policies.preset`, or {"framework": name, ...} with its parameters; a `ScalePolicy`; a `LossScaler`;
                   or a function of the network.
        boost:     "O0" to "O2", "tuned", names of algorithms joined by "+" ("less_bn+grad_freeze",
                   "grad_centralization"), a configuration of `AutoBoost` (its "level" beside the sections), or one.
        recipe:    a recipe that `cast_like` knows, by name or as an object, in place of `level`.
        epochs, batch, seed:  epochs (>= 1), rows of a batch made here, what fixes weights and order.
        keep:      also return the trained `network`; not in an experiment, which stores numbers.
    Returns:  loss (per step), final_loss (mean of the last epoch), accuracy (percent, after the last epoch, without
              labels -100) and accuracy_curve (after every epoch) where labels are classes and the output has two or
              more columns of scores, else test_loss and test_loss_curve;
              step_seconds (each step), seconds_per_step, skipped (steps), last_scale and scale (per step; 1 without
              scaling), on a GPU peak_memory_mib, and the network if asked for.
    Units:    seconds_per_step is the median of a step's wall time after the first 5; on a GPU the mean, the device
              waited for at both ends of an epoch. peak_memory_mib is what torch allocated.
    Raises:   TypeError, ValueError for arguments, before a step is made.
    """
    check_count("epochs", epochs)
    check_count("batch", batch)
    if recipe is not None and level != "O0":
        raise ValueError(f"a recipe says itself what is cast, so level stays 'O0' with it, got {level!r}")
    check_flags(keep=keep)
    device = default_device()
    torch.manual_seed(seed)
    batches, test, steps = batches_of(data, batch, seed, device)
    net = parts.network_of(network).to(device)
    net, rule, auto = parts.boosted(boost, net, parts.optimizer_of(optimizer, net, lr), epochs * steps)
    parts.cast_network(net, level, dtype, recipe)
    function = parts.usual_loss if loss is None else loss
    wide, sense = recipe is not None or level != "O0", parts.scaler_of(scaler, net)
    cell = parts.step_of(net, function, wide, rule, sense, boost=auto)
    outcomes, tests, seconds = list[StepOutcome](), list[tuple[str, float]](), list[float]()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(epochs):
        outcomes += _steps(cell.train(), batches, device, seconds)
        tests += [] if test is None else [_tested(net.eval(), function, test, device)]
    return _told(outcomes, tests, steps, seconds) | ({"network": net} if keep else {})


def _told(outcomes: list[StepOutcome], tests: list[Any], steps: int, seconds: list[float]) -> dict[str, Any]:
    """What a run of epochs of so many steps returns."""
    losses = torch.stack([o.loss.float() for o in outcomes]).tolist()
    scales = torch.stack([o.scale.float().mean() for o in outcomes]).tolist()
    result: dict[str, Any] = {"loss": losses, "final_loss": statistics.fmean(losses[-steps:])}
    for name in dict.fromkeys(name for name, _ in tests):
        result |= {name: tests[-1][1], f"{name}_curve": [value for _, value in tests]}
    skipped = int(torch.stack([o.overflow.any() for o in outcomes]).sum())
    result |= {"skipped": skipped, "last_scale": scales[-1], "scale": scales, "step_seconds": seconds}
    cuda = outcomes[0].loss.is_cuda
    result["seconds_per_step"] = (statistics.fmean if cuda else statistics.median)(seconds[WARM:] or seconds)
    if cuda:
        result["peak_memory_mib"] = torch.cuda.max_memory_allocated() / 2**20
    return result


def _steps(cell: nn.Module, batches: Iterable[Any], device: torch.device, seconds: list[float]) -> list[StepOutcome]:
    """What the steps of an epoch gave, and to `seconds` what each took; a GPU is waited for at both ends."""
    wait = torch.cuda.synchronize if device.type == "cuda" else bool
    outcomes = list[StepOutcome]()
    for x, y in map(pair_of, batches):
        if len(seconds) == WARM or not outcomes:
            wait()
        start = time.perf_counter()
        out = cell(_moved(x, device), _moved(y, device))
        seconds.append(time.perf_counter() - start)
        # a step without loss scaling returns the loss alone
        plain = not isinstance(out, StepOutcome)
        outcomes.append(StepOutcome(out, torch.zeros((), dtype=torch.bool), torch.ones(())) if plain else out)
    if not outcomes:
        raise ValueError("the data gave no batch; pass what can be iterated anew in every epoch, not a generator")
    start = time.perf_counter()
    wait()
    seconds[-1] += time.perf_counter() - start
    return outcomes


def _tested(
    net: nn.Module, loss: Callable[[Any, Any], Tensor], batches: Iterable[Any], device: torch.device
) -> tuple[str, float]:
    """("accuracy", percent) where labels are classes, else ("test_loss", mean over the rows)."""
    total, rows, name = 0.0, 0, ""
    with torch.no_grad():
        for x, y in map(pair_of, batches):
            out, y = widened(net(_moved(x, device))), _moved(y, device)
            if (classes := _classes(out, y, loss)) is not None:
                name, counted = "accuracy", y != IGNORED
                total += 100 * float(((out.argmax(classes) == y) & counted).sum())
                rows += int(counted.sum())
            else:
                name, count = "test_loss", next((len(p) for p in tree_leaves(y) if isinstance(p, Tensor)), 1)
                total += float(loss(out, y)) * count
                rows += count
    if not name:
        raise ValueError("the test data gave no batch; pass what can be iterated anew in every epoch, not a generator")
    return name, total / rows if rows else float("nan")


def _classes(out: object, y: object, loss: object) -> int | None:
    """The axis of the scores of classes; None where the labels are no classes, or nobody could tell which axis it is.

    One column is no choice among classes: its sign, or its distance to the label, is what counts.
    """
    if not isinstance(out, Tensor) or not isinstance(y, Tensor) or y.is_floating_point() or out.dim() != y.dim() + 1:
        return None
    last = y.dim() > 1 and out.shape[:-1] == y.shape
    if last and out.shape[:1] + out.shape[2:] == y.shape and loss is not parts.usual_loss:
        return None
    axis = out.dim() - 1 if last else 1
    return axis if y.dim() > 0 and out.shape[axis] > 1 else None


def _moved(value: object, device: torch.device) -> Any:
    return map_tensors(lambda part: part.to(device, non_blocking=True), value)
