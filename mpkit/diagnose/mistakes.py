"""The mistakes of a training loop that `watch_loop` knows, each with the line that mends it."""

from __future__ import annotations

from dataclasses import dataclass, field

MISTAKES = {
    "not_cleared": "the gradients of earlier steps are still in the sum: call optimizer.zero_grad() once per step, "
    "before the first backward()",
    "cleared_early": "the gradients were cleared before the step could use them: move optimizer.zero_grad() behind "
    "scaler.step(optimizer) and scaler.update(), or before the first backward()",
    "no_update": "the scale never adapts, and the next step() or unscale_() refuses: call scaler.update() once after "
    "the scaler.step(optimizer) of all optimizers",
    "update_per_micro_batch": "the scale may change while gradients are summed: call scaler.update() only where "
    "scaler.step(optimizer) was called, once per step",
    "bare_step": "the step takes gradients that are multiplied by the scale, and takes inf and NaN too: write "
    "scaler.step(optimizer) in place of optimizer.step()",
    "unscaled_backward": "the step divides by a scale that the loss was never multiplied by: write "
    "scaler.scale(loss).backward() in place of loss.backward()",
    "no_scaler": "small gradients become zero in float16: scaler = torch.amp.GradScaler(device), then "
    "scaler.scale(loss).backward(), scaler.step(optimizer), scaler.update(); or use torch.autocast(device, "
    "torch.bfloat16), which needs none",
    "unscale_per_micro_batch": "gradients times the scale were added to gradients that were divided by it already: "
    "call scaler.unscale_(optimizer) once, after the last backward() of the step",
    "clip_before_unscale": "the limit means limit / scale, because the gradients are still multiplied by the scale: "
    "call scaler.unscale_(optimizer) before the clipping",
    "nan_hidden": "the scaler sees no overflow any more, so it neither skips the step nor lowers the scale: take the "
    "replacement of NaN out, and let scaler.step(optimizer) skip the step",
    "inside_autocast": "backward() and step() belong outside of autocast, which covers the forward pass and the loss: "
    "end the `with torch.autocast(...)` block before loss.backward()",
    "new_scaler": "every new scaler begins its search for the scale again: make scaler = "
    "torch.amp.GradScaler(device) once, before the first epoch",
    "schedule_counts_skips": "the rate moved on although the step was skipped: before = scaler.get_scale(); "
    "scaler.update(); then `if scaler.get_scale() >= before: scheduler.step()`",
    "not_divided": "the sum over micro-batches is that many times the gradient of the whole batch: "
    "(loss / micro_batches).backward(), inside scaler.scale(...) if there is a scaler",
    "scaled_penalty": "the penalty is computed from gradients times the scale: grads = "
    "[g / scaler.get_scale() for g in grads] before the penalty",
    "idle_optimizer": "its parameters get gradients and never move: call scaler.step(optimizer) for it too (without a "
    "scaler optimizer.step()), and its zero_grad()",
}


@dataclass(frozen=True)
class LoopFinding:
    """What a loop does wrong: its `mistake` (a key of `MISTAKES`), `where` it is (optimizer, step, line) and the
    `advice`, with the line that mends it."""

    mistake: str
    where: str
    advice: str

    def __str__(self) -> str:
        return f"{self.mistake}: {self.where}: {self.advice}"


@dataclass
class LoopReport:
    """What was seen of a loop: `findings`, one for each mistake of an optimizer; `steps` it took, skipped ones too."""

    findings: list[LoopFinding] = field(default_factory=list)
    steps: int = 0

    def __str__(self) -> str:
        seen = f"{self.steps} step{'s' * (self.steps != 1)} watched"
        if not self.findings:
            return f"{seen}: no mistake" if self.steps else f"{seen}: let the loop run inside the `with` block"
        return "\n".join([f"{seen}:", *(f"  {found}" for found in self.findings)])
