"""Watch a training loop for a few steps, and say what it does wrong in mixed precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mpkit.diagnose.gradients import Pass, Watched, divides_by, length, look, nodes, note, noted, terms, undivided
from mpkit.diagnose.listening import Listening, callers, in_own_autocast, line, same, scale_of, several, tensors_in
from mpkit.diagnose.words import MISTAKES, LoopFinding, LoopReport

_BY_HAND = 8.0  # a factor of a loss from which it counts as a loss scale that the reader multiplies by
Call = Callable[..., Any]  # the function that the watching one stands for


class watch_loop:  # used as a function: with watch_loop(...) as report
    """Watch your own training loop for two or three steps: what it does wrong, and the line that mends it.

    What the loop does is watched, not its text: hooks of the optimizers' steps, the gradients between the calls, the
    methods of the scaler, the state of autocast. It trains as it would without. Works with `torch.amp.GradScaler`, with
    a scaler that has its methods, and with none.

    Args:
        network:    the network, or several.
        optimizer:  its optimizer, or all of them in a list: one that never steps is found.
        scaler:     the scaler; a GradScaler that the loop makes itself is seen too.
    Returns: (as the value of the `with`) a LoopReport: `findings` with `mistake`, `where`, `advice`; print it. An
             error in the loop gets the report as a note, since a mistake often ends in one.
    Edges:   a mistake that shows only when a step overflows (a schedule that counts skipped steps) is seen only if one
             does; give the scaler a large first scale to see it. Watching costs less than a tenth of a step of 3 ms in
             its first ten steps, half of that later, and nothing outside of the block.

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
        optimizer: Optimizer | Sequence[Optimizer],
        scaler: GradScaler | None = None,
    ) -> None:
        several("network", network, nn.Module, "an nn.Module")
        optimizers = several("optimizer", optimizer, Optimizer, "a torch.optim.Optimizer")
        scale_of(scaler)  # raises for what is none
        self.report = LoopReport()
        self._scaler = scaler
        kinds = [type(one).__name__ for one in optimizers]
        # of several optimizers one may have a scaler of its own
        alone = scaler if isinstance(scaler, GradScaler) and len(kinds) == 1 else None
        names = kinds if len(kinds) == 1 else [f"optimizer {i + 1} ({kind})" for i, kind in enumerate(kinds)]
        self._watched = [Watched(one, name, alone) for one, name in zip(optimizers, names)]
        self._pass: Pass | None = None  # the backward pass that runs
        self._in_scaler = False
        self._stepping: Optimizer | None = None
        self._scales = self._penalty = False  # a loss was scaled; gradients of a scaled one were kept
        self._done: set[str] = set()  # since the last update of a scaler
        self._known: dict[Optimizer, Watched | None] = {}  # any optimizer -> what is watched under it
        self._listening = Listening()

    def __enter__(self) -> LoopReport:
        swap = self._listening.swap
        swap(torch.autograd, "backward", self._backward)
        swap(torch.autograd, "grad", self._grad)
        for owner in (torch, Tensor):
            swap(owner, "nan_to_num", self._nan_to_num)
            swap(owner, "nan_to_num_", self._nan_to_num)
        for kind in {GradScaler, *type(self._scaler).__mro__}:
            for name in {"scale", "unscale_", "step", "update"} & set(vars(kind)):
                swap(kind, name, partial(self._of_scaler, getattr(self, f"_{name}")))
        self._listening.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        self._listening.callback(register_optimizer_step_post_hook(self._after_step).remove)
        return self.report

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._listening.close()
        if error is None:
            self._at_the_end()
        elif self.report.findings:
            error.add_note(f"watch_loop: {self.report}")

    def _say(self, watched: Watched, step: int | None = None, **mistakes: object) -> None:
        """Those that are true, each once for an optimizer; `step` is the one that comes, if none is given."""
        for mistake in (name for name, so in mistakes.items() if so):
            if mistake not in watched.told:
                watched.told.add(mistake)
                where = ", ".join(filter(None, (f"{watched.name}, step {step or watched.steps + 1}", line())))
                self.report.findings.append(LoopFinding(mistake, where, MISTAKES[mistake]))

    # --- the backward pass

    @property
    def _rests(self) -> bool:
        """After ten steps two in ten are looked at; what a scaler does is seen in all."""
        tens, ones = divmod(self.report.steps, 10)
        return tens > 0 and ones >= 2

    def _backward(self, original: Call, tensors: object, seeds: object = None, *args: object, **more: object) -> None:
        for watched in self._watched if self._rests else ():
            watched.start_over()  # gradients that nobody looks at are unknown
        if self._pass is not None or self._rests:  # a re-entrant checkpoint inside another
            original(tensors, seeds, *args, **more)
            return
        losses = [t for t in tensors_in(tensors) if t.grad_fn is not None]
        if self._penalty:  # gradients were kept from a scaled loss: does this one use them divided by the scale?
            graph = list(nodes(losses))
            scale = noted("scale", graph) or 1.0
            scaled = scale != 1 and not any(divides_by(node, scale) for node in graph)
            self._say(self._watched[0], scaled_penalty=scaled)
            self._penalty = False
        for watched in self._watched:
            if watched.passes and (watched.used or look(watched.few) != watched.marks) and watched.cleared():
                watched.start_over()
            self._say(watched, **watched.changes())
        before = [look(watched.few) for watched in self._watched]
        once = not (any(args[:2]) or more.get("retain_graph") or more.get("create_graph"))
        self._pass = this = self._begun(losses, seeds, once)
        try:
            original(tensors, seeds, *args, **more)
        finally:
            self._pass = None
        for watched, marks in zip(self._watched, before):
            if look(watched.few) != marks:
                self._reached(watched, this)

    def _begun(self, losses: list[Tensor], seeds: object, once: bool) -> Pass:
        """once: no other backward pass will begin from the same graph, whose loss would be one of several."""
        scaler = self._scaler_of(losses)
        scale = scale_of(scaler)
        seeds = () if seeds is None else tensors_in(seeds)
        seed = max((abs(float(t)) for t in seeds if t.numel() == 1), default=1)
        graph = losses if scaler is None and self.report.steps % 10 == 0 else []  # one step in ten: it may be large
        results = (result for node in nodes(graph) for result in node._input_metadata)
        factors = [(abs(factor) * seed / scale, mean) for loss in losses for factor, mean in terms(loss)]
        return Pass(
            site=hash(tuple((id(frame.f_code), frame.f_lasti) for frame in callers())),
            scaler=scaler,
            factor=max((factor for factor, _ in factors), default=seed),
            means=tuple(factor for factor, mean in factors if mean and once),
            low=any(result.dtype == torch.float16 for result in results),
        )

    def _reached(self, watched: Watched, this: Pass) -> None:
        again = watched.unscaled and watched.passes and this.scaler
        self._say(watched, inside_autocast=in_own_autocast(watched.device), unscale_per_micro_batch=again)
        if this.scaler is not None or not watched.unscaled:  # what is added to unscaled gradients needs no scale
            watched.passes.append(this)
        self._done.add("backward")
        watched.remember()

    def _scaler_of(self, losses: list[Tensor]) -> Any:
        return noted("scaler", nodes(losses)) if self._scales else None

    def _grad(self, original: Call, outputs: object, *args: object, **more: object) -> object:
        scaler = self._scaler_of(tensors_in(outputs))
        gradients = original(outputs, *args, **more)
        if scaler is not None:
            note("scale", scale_of(scaler), tensors_in(gradients))
            self._penalty = True
        return gradients

    def _nan_to_num(self, original: Call, given: Tensor, *args: object, **more: object) -> Tensor:
        in_hook = self._pass is not None and self._pass.scaler is not None and not torch.is_grad_enabled()
        for watched in self._watched if isinstance(given, Tensor) else ():
            its = watched.params if in_hook or watched.scaler is not None else ()
            self._say(watched, nan_hidden=any(p.shape == given.shape if in_hook else same(p.grad, given) for p in its))
        return original(given, *args, **more)

    # --- the scaler

    def _of_scaler(self, watching: Call, original: Call, scaler: GradScaler, *args: object, **more: object) -> object:
        """Let `watching` see what the reader asks of a scaler that is enabled; what it asks of itself is its own."""

        def inside(*args: object, **more: object) -> object:
            self._in_scaler = True
            try:
                return original(scaler, *args, **more)
            finally:
                self._in_scaler = False

        if self._in_scaler or not getattr(scaler, "is_enabled", lambda: True)():
            return original(scaler, *args, **more)
        return watching(inside, scaler, *args, **more)

    def _scale(self, original: Call, scaler: GradScaler, outputs: object) -> object:
        scaled = original(outputs)
        note("scaler", scaler, tensors_in(scaled))
        self._scales = True
        return scaled

    def _unscale_(self, original: Call, scaler: GradScaler, optimizer: Optimizer) -> object:
        watched = self._of(optimizer)
        if watched is None:
            return original(optimizer)
        self._say(watched, no_update=watched.waits_for is scaler, **watched.changes())
        result = original(optimizer)
        watched.unscaled = True
        self._done.add("unscale")
        if undivided(watched.fresh):
            watched.remember()
        return result

    def _step(self, original: Call, scaler: GradScaler, optimizer: Optimizer, *args: object, **more: object) -> object:
        watched = self._of(optimizer)
        if watched is None:
            return original(optimizer, *args, **more)
        self._check_step(watched, scaler)
        watched.applied = False
        result = original(optimizer, *args, **more)
        watched.waits_for = scaler
        self._stepped(watched)
        return result

    def _update(self, original: Call, scaler: GradScaler, *args: object, **more: object) -> object:
        too_early, self._done = self._done == {"backward"} and not args and not more, set()
        for watched in self._watched if too_early else ():
            self._say(watched, update_per_micro_batch=watched.fresh)
        before = scale_of(scaler)
        result = original(*args, **more)
        for watched in self._watched:
            watched.waits_for = None if watched.waits_for is scaler else watched.waits_for
            fused = getattr(watched.optimizer, "_step_supports_amp_scaling", False)
            if scale_of(scaler) < before and watched.life and (fused or not watched.applied):
                watched.life[-1].add("skipped")
        return result

    # --- the step

    def _of(self, optimizer: Optimizer) -> Watched | None:
        """What is watched under this optimizer or one inside of it."""
        if optimizer not in self._known:
            params = {id(p) for group in optimizer.param_groups for p in group["params"]}
            found = (w for w in self._watched if not params.isdisjoint(map(id, w.params)))
            self._known[optimizer] = next(found, None)
        return self._known[optimizer]

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        self._stepping = self._stepping or optimizer  # the outer one, where one is inside another
        if (watched := self._of(optimizer)) is not None and not self._in_scaler:
            watched.untouched = look(watched.few) == watched.marks

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        """A step leaves the gradients as they were, or clears them at its end, and a closure has made them only now."""
        if optimizer is not self._stepping:
            return
        self._stepping = None
        if (watched := self._of(optimizer)) is not None:
            watched.applied = True
            if not self._in_scaler:
                self._check_step(watched, None)
                self._stepped(watched)

    def _check_step(self, watched: Watched, scaler: GradScaler | None) -> None:
        watched.see_rates()
        fresh, first = watched.fresh, watched.first_scaler
        watched.first_scaler = scaler if first is None else first
        new_scaler = scaler is not None and first not in (None, scaler)
        no_update = scaler is not None and watched.waits_for is scaler
        self._say(watched, inside_autocast=in_own_autocast(watched.device), new_scaler=new_scaler, no_update=no_update)
        changed = fresh and not watched.untouched and look(watched.few) != watched.marks
        if changed and watched.cleared() and (before := length(watched.norms)):  # they were not 0 before
            known = watched.unscaled  # unscale_ has seen every inf
            hidden = not math.isfinite(before) and (known or any(p.grad is not None for p in watched.few))
            self._say(watched, nan_hidden=hidden and not known, cleared_early=not hidden)
            return
        by = next((p.scaler for p in fresh if p.scaler is not None), None)
        bare = scaler is None and by is not None
        plain = [p for p in fresh if p.scaler is None and p.factor < _BY_HAND]
        self._say(
            watched,
            **watched.changes(),
            not_cleared=fresh and watched.used,
            unscaled_backward=scaler is not None and plain,
            bare_step=bare and (watched.unscaled or not watched.divided_by(scale_of(by))),
            no_scaler=scaler is None and any(p.low for p in plain),
            not_divided=undivided(fresh) and not watched.divided_later(),
        )

    def _stepped(self, watched: Watched) -> None:
        watched.stepped()
        self._done.add("stepped")
        self.report.steps = max(w.steps for w in self._watched)

    def _at_the_end(self) -> None:
        for watched in self._watched:
            watched.see_rates()
            every = sum("schedule" in step for step in watched.life) >= max(2, watched.steps - 1)
            self._say(
                watched,
                watched.steps or self.report.steps,
                no_update=watched.waits_for is not None,
                idle_optimizer=not watched.steps and watched.passes and self.report.steps > 1,
                schedule_counts_skips=every and {"skipped", "schedule"} in watched.life,
            )
