"""Watch a training loop for a few steps, and say what it does wrong in mixed precision."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mpkit.diagnose.gradients import Pass, Watched, length, look, norms, undivided
from mpkit.diagnose.graph import divides_by, nodes, terms
from mpkit.diagnose.listening import Listening, callers, family, line, same, scale_of, several, tensors_in
from mpkit.diagnose.mistakes import MISTAKES, LoopFinding, LoopReport

_BY_HAND = 8.0  # a factor of a loss from which it counts as a loss scale that the reader multiplies by


T = TypeVar("T")


class watch_loop:  # used as a function: with watch_loop(...) as report
    """Watch your own training loop for two or three steps: what it does wrong, and the line that mends it.

    What the loop does is watched, not its text: hooks of the optimizers' steps, the gradients between the calls, the
    methods of the scaler, the state of autocast. It trains as it would without. Works with `torch.amp.GradScaler`, with
    a scaler that has its methods, and with none.

    Args:
        network:    the network, or several.
        optimizer:  its optimizer, or all of them in a list: one that never steps is found.
        scaler:     the scaler; one that the loop makes itself is seen too.
    Returns: (as the value of the `with`) a LoopReport: `findings` with `mistake`, `where`, `advice`; print it. An
             error in the loop gets the report as a note, since a mistake often ends in one.
    Edges:   a mistake that shows only when a step overflows (a schedule that counts skipped steps) is seen only if one
             does; give the scaler a large first scale to see it. Watching costs about a quarter of a millisecond a
             step, with a GradScaler half of one, however large the network is; and nothing outside of the block.

    >>> network = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(network.parameters(), 0.1)
    >>> with watch_loop(network, optimizer) as report:
    ...     for _ in range(2):
    ...         network(torch.ones(4, 2)).mean().backward()
    ...         optimizer.step()
    >>> [(found.mistake, found.where.split(", line")[0]) for found in report.findings]
    [('not_cleared', 'SGD, step 2')]
    """

    def __init__(
        self,
        network: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer],
        scaler: GradScaler | None = None,
    ) -> None:
        networks = several("network", network, nn.Module, "an nn.Module")
        optimizers = several("optimizer", optimizer, Optimizer, "a torch.optim.Optimizer")
        if scaler is not None and not callable(getattr(scaler, "scale", None)):
            raise TypeError(f"scaler must have a method scale, as torch.amp.GradScaler has it, got {scaler!r:.80}")
        self.report = LoopReport()
        self._scaler = scaler
        self._own = {id(p) for n in networks for p in n.parameters()}
        self._watched: list[Watched] = []
        for o in optimizers:
            name = type(o).__name__
            self._watched.append(Watched(o, name if len(optimizers) == 1 else f"optimizer {self._next} ({name})"))
        self._in_backward = self._in_scaler = False
        self._stepping: Optimizer | None = None
        self._through: list[Any] = []  # scalers whose product the last backward pass began from
        self._low = False  # autocast to float16 was on since the last step
        self._done: dict[int, set[str]] = {}  # scaler -> what it did since its last update
        self._known: dict[int, tuple[Any, Watched | None]] = {}  # any optimizer, and who is watched under it
        self._penalties: list[tuple[set[Any], float]] = []  # nodes of scaled gradients that were kept, and the scale
        self._listening = Listening()

    @property
    def _next(self) -> int:
        return len(self._watched) + 1

    def __enter__(self) -> LoopReport:
        swap = self._listening.swap
        swap(torch.autograd, "backward", self._backward)
        swap(torch.autograd, "grad", self._grad)
        for owner in (torch, Tensor):
            swap(owner, "nan_to_num", self._nan_to_num)
            swap(owner, "nan_to_num_", self._nan_to_num)
        swap(torch.autocast, "__enter__", self._autocast)
        for kind in {*family(GradScaler), *(() if self._scaler is None else type(self._scaler).__mro__[:-1])}:
            for name in {"scale", "unscale_", "step", "update"} & set(vars(kind)):
                swap(kind, name, partial(self._of_scaler, getattr(self, f"_{name}")))
        for kind in family(LRScheduler):
            if "step" in vars(kind):
                swap(kind, "step", self._schedule)
        self._listening.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        self._listening.callback(register_optimizer_step_post_hook(self._after_step).remove)
        return self.report

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._listening.close()
        if error is None:
            self._at_the_end()
        elif self.report.findings:
            error.add_note(f"watch_loop: {self.report}")

    def _say(self, watched: Watched, **mistakes: object) -> None:
        """Those that are true, each once for an optimizer."""
        for mistake in (name for name, so in mistakes.items() if so):
            if not any(f.mistake == mistake and f.where.startswith(f"{watched.name}, ") for f in self.report.findings):
                where = ", ".join(filter(None, (f"{watched.name}, step {watched.steps + 1}", line())))
                self.report.findings.append(LoopFinding(mistake, where, MISTAKES[mistake]))

    # --- the backward pass

    def _backward(
        self, original: Callable[..., None], tensors: object, seeds: object = None, *args: object, **more: object
    ) -> None:
        if self._in_backward:  # a re-entrant checkpoint inside another
            return original(tensors, seeds, *args, **more)
        losses = [t for t in tensors_in(tensors) if t.grad_fn is not None]
        self._look_for_penalties(losses)
        seed = max((abs(float(t)) for t in tensors_in(seeds) if t.numel() == 1), default=1)
        factors = [(abs(factor) * seed, mean) for loss in losses for factor, mean in terms(loss)]
        several_losses = any(args[:2]) or more.get("retain_graph") or more.get("create_graph")
        for watched in self._watched:
            if watched.passes and (watched.used or look(watched.few) != watched.marks) and watched.cleared():
                watched.start_over()
            self._look_at_changes(watched)
        before = [look(watched.params) for watched in self._watched]
        self._through, self._in_backward = [], True
        try:
            original(tensors, seeds, *args, **more)
        finally:
            self._in_backward = False
        scaler = self._through[0] if self._through else None
        scale = scale_of(scaler)
        this = Pass(
            site=hash(tuple((id(frame.f_code), frame.f_lasti) for frame in callers())),
            scaler=scaler,
            factor=max((factor for factor, _ in factors), default=1.0) / scale,
            means=tuple(factor / scale for factor, mean in factors if mean and not several_losses),
            low=self._low or any(loss.dtype == torch.float16 for loss in losses),
        )
        for watched, marks in zip(self._watched, before):
            if look(watched.params) != marks:
                self._reached(watched, this)
        return None

    def _reached(self, watched: Watched, this: Pass) -> None:
        self._say(
            watched,
            inside_autocast=watched.in_autocast,
            unscale_per_micro_batch=watched.unscaled and watched.passes and not watched.used,
        )
        watched.passes.append(this)
        for done in self._done.values():
            done.add("backward")
        watched.marks, watched.norms = look(watched.few), []
        if this.scaler is not None or undivided(watched.fresh):
            watched.remember()

    def _grad(self, original: Callable[..., Any], *args: object, **more: object) -> object:
        self._through = []
        gradients = original(*args, **more)
        kept = {g.grad_fn for g in tensors_in(gradients) if g.grad_fn is not None}
        if self._through and kept:
            self._penalties.append((kept, scale_of(self._through[0])))
        return gradients

    def _look_for_penalties(self, losses: list[Tensor]) -> None:
        """Were gradients kept from a scaled loss, and used in this one without a division by the scale?"""
        for kept, scale in self._penalties if losses else ():
            graph = list(nodes(losses))
            divided = scale == 1 or any(divides_by(node, scale) for node in graph)
            self._say(self._watched[0], scaled_penalty=not divided and not kept.isdisjoint(graph))
        self._penalties = []

    # --- what the reader does to gradients between the calls

    def _look_at_changes(self, watched: Watched) -> None:
        """Whether the gradients of scaled passes were limited, or their NaN taken out, before they are unscaled."""
        if watched.scaler is None or not watched.norms:
            return
        changed = [old != new for old, new in zip(watched.marks, look(watched.few)) if new != (0, 0)]
        if not changed or (any(changed) and not all(changed)):
            return  # they were cleared, or a part of them was set
        before, now = length(watched.norms), length(norms(watched.few))
        ratio = before / now if now else math.nan
        shared = ratio < 1024 and math.isclose(ratio, round(ratio), rel_tol=1e-5)  # a mean over so many
        divided = shared or math.isclose(ratio, scale_of(watched.scaler), rel_tol=1e-5)
        self._say(
            watched,
            nan_hidden=not math.isfinite(before) and math.isfinite(now),
            clip_before_unscale=math.isfinite(before) and ratio > 1 and not divided,
        )

    def _nan_to_num(self, original: Callable[..., Tensor], given: Tensor, *args: object, **more: object) -> Tensor:
        in_hook = self._in_backward and self._through and not torch.is_grad_enabled()
        for watched in self._watched if isinstance(given, Tensor) else ():
            if in_hook:
                hidden = any(p.shape == given.shape for p in watched.params)
            else:
                hidden = watched.scaler is not None and any(same(p.grad, given) for p in watched.params)
            self._say(watched, nan_hidden=hidden)
        return original(given, *args, **more)

    # --- the scaler

    def _of_scaler(
        self, watching: Callable[..., T], original: Callable[..., T], scaler: GradScaler, *args: object, **more: object
    ) -> T:
        """Let `watching` see what the reader asks of a scaler that is enabled; what it asks of itself is its own."""
        if self._in_scaler or not getattr(scaler, "is_enabled", lambda: True)():
            return original(scaler, *args, **more)

        def inside(*given: object, **named: object) -> T:
            self._in_scaler = True
            try:
                return original(scaler, *given, **named)
            finally:
                self._in_scaler = False

        self._done.setdefault(id(scaler), set())
        return watching(inside, scaler, *args, **more)

    def _scale(self, original: Callable[..., Any], scaler: GradScaler, outputs: object) -> object:
        scaled = original(outputs)
        for t in tensors_in(scaled):
            if t.requires_grad:
                t.register_hook(lambda _: self._through.append(scaler))
        return scaled

    def _unscale_(self, original: Callable[..., Any], scaler: GradScaler, optimizer: Optimizer) -> object:
        watched = self._of(optimizer)
        if watched is None:
            return original(optimizer)
        self._say(watched, no_update=self._has_stepped(scaler, watched))
        self._look_at_changes(watched)
        result = original(optimizer)
        watched.unscaled = True
        self._done[id(scaler)].add("unscale")
        if undivided(watched.fresh):
            watched.remember()
        return result

    def _step(
        self, original: Callable[..., Any], scaler: GradScaler, optimizer: Optimizer, *args: object, **more: object
    ) -> object:
        watched = self._of(optimizer)
        if watched is None:
            return original(optimizer, *args, **more)
        self._say(watched, no_update=self._has_stepped(scaler, watched))
        self._about_to_step(watched, scaler)
        watched.applied = False
        result = original(optimizer, *args, **more)
        self._done[id(scaler)].add(watched.name)
        self._stepped(watched)
        return result

    def _update(self, original: Callable[..., Any], scaler: GradScaler, *args: object, **more: object) -> object:
        per_micro_batch = self._done[id(scaler)] == {"backward"} and not args and not more
        for watched in self._watched:
            self._say(watched, update_per_micro_batch=per_micro_batch and watched.fresh)
        before = scale_of(scaler)
        self._done[id(scaler)] = set()
        result = original(*args, **more)
        for watched in self._watched:
            fused = getattr(watched.optimizer, "_step_supports_amp_scaling", False)
            if scale_of(scaler) < before and (fused or not watched.applied):
                watched.skipped()
        return result

    def _has_stepped(self, scaler: GradScaler, watched: Watched) -> bool:
        return watched.name in self._done[id(scaler)]

    # --- the step

    def _of(self, optimizer: Optimizer) -> Watched | None:
        """What is watched under this optimizer or one inside of it; another one of the network from now on too."""
        if id(optimizer) not in self._known:
            self._known[id(optimizer)] = optimizer, self._find(optimizer)
        return self._known[id(optimizer)][1]

    def _find(self, optimizer: Optimizer) -> Watched | None:
        params = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for watched in self._watched:
            if not params.isdisjoint(map(id, watched.params)):
                return watched
        if params.isdisjoint(self._own):
            return None
        self._watched.append(Watched(optimizer, f"optimizer {self._next} ({type(optimizer).__name__})"))
        return self._watched[-1]

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        watched = self._of(optimizer)
        if watched is None or self._stepping not in (None, optimizer):  # one inside another
            return None
        self._stepping, watched.applied = optimizer, True
        if self._in_scaler:
            return None
        closure = kwargs.get("closure") or next((a for a in args[1:] if callable(a)), None)
        if closure is None:
            self._about_to_step(watched, None)
            return None

        def evaluated(*given: object, **named: object) -> object:
            result = closure(*given, **named)
            self._about_to_step(watched, None)
            watched.used = len(watched.passes)
            return result

        args = tuple(evaluated if a is closure else a for a in args)
        return args, {key: evaluated if value is closure else value for key, value in kwargs.items()}

    def _after_step(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        if optimizer is self._stepping:
            self._stepping = None
            watched = self._of(optimizer)
            if watched is not None and not self._in_scaler:
                self._stepped(watched)

    def _about_to_step(self, watched: Watched, scaler: GradScaler | None) -> None:
        watched.see_rates()
        fresh = watched.fresh
        new = scaler is not None and not any(scaler is s for s in watched.scalers)
        if new:
            watched.scalers.append(scaler)
        other = isinstance(self._scaler, GradScaler) and scaler is not self._scaler
        self._say(watched, inside_autocast=watched.in_autocast, new_scaler=new and (len(watched.scalers) > 1 or other))
        if fresh and look(watched.few) != watched.marks and watched.cleared():
            there = any(p.grad is not None for p in watched.few)
            hidden = there and not math.isfinite(length(watched.norms))
            self._say(watched, nan_hidden=hidden, cleared_early=not hidden)
            return
        self._look_at_changes(watched)
        by = next((p.scaler for p in fresh if p.scaler is not None), None)
        bare = scaler is None and by is not None
        plain = [p for p in fresh if p.scaler is None and p.factor < _BY_HAND]
        self._say(
            watched,
            not_cleared=fresh and watched.used,
            unscaled_backward=scaler is not None and plain,
            bare_step=bare and (watched.unscaled or not math.isclose(watched.shrunk(), scale_of(by), rel_tol=1e-5)),
            no_scaler=scaler is None and any(p.low for p in plain),
            not_divided=undivided(fresh) and not watched.divided_later(),
        )

    def _stepped(self, watched: Watched) -> None:
        watched.stepped()
        for done in self._done.values():
            done.add("stepped")
        self._low = False
        self.report.steps = max(w.steps for w in self._watched)

    # --- around them

    def _autocast(self, original: Callable[..., Any], context: torch.autocast) -> object:
        result = original(context)
        low = torch.get_autocast_dtype(context.device) == torch.float16 and torch.is_autocast_enabled(context.device)
        self._low = self._low or (low and torch.is_grad_enabled())
        return result

    def _schedule(self, original: Callable[..., Any], schedule: object, *args: object, **more: object) -> object:
        begins = getattr(schedule, "last_epoch", 0) < 0  # its constructor takes a first step
        result = original(schedule, *args, **more)
        watched = self._of(schedule.optimizer) if hasattr(schedule, "optimizer") else None
        if watched is not None and not begins:
            watched.see_rates(moved=True)
        return result

    def _at_the_end(self) -> None:
        busiest = max(watched.steps for watched in self._watched)
        for watched in self._watched:
            watched.see_rates()
            after = Counter(zip(watched.life, watched.life[1:]))
            every = watched.life.count("schedule") >= watched.steps - 1
            self._say(
                watched,
                no_update=any(watched.name in done for done in self._done.values()),
                idle_optimizer=not watched.steps and watched.passes and busiest > 1,
                schedule_counts_skips=after["skipped", "schedule"] and every,
            )
