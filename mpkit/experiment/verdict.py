"""What can be concluded of a cell beside its baseline: a verdict and a sentence."""

from __future__ import annotations

from mpkit.experiment.statistics import Paired

UP = ("accuracy", "score", "auc", "bleu", "speed", "per_second")
DOWN = ("loss", "error", "second", "memory", "skipped", "perplexity")


def direction(metric: str) -> bool | None:
    """Whether more of a metric is better, as far as its name tells.

    >>> direction("accuracy"), direction("final_loss"), direction("loss_scale")
    (True, False, None)
    """
    if "scale" in metric:
        return None
    if any(word in metric for word in UP):
        return True
    return False if any(word in metric for word in DOWN) else None


def concluded(label: str, base: str | None, own: Paired, done: int, d: Paired, corrected: float, tests: int,
    up: bool | None) -> tuple[str, str]:  # fmt: skip
    """Verdict and sentence on a cell.

    Args:    base: the baseline, None for the cell that is it. own, done: its finite numbers, of so many runs.
             d: the difference; corrected: its p after the correction for so many tests. up: whether more is better.
    """
    if not own.n:
        return "no number", f"{label}: none of {_many(done, 'run')} gave a finite number."
    verdict, words = _verdict(base, own, d, corrected, tests, up)
    left_out = f" {done - own.n} of {done} runs gave no finite number and are left out." if done > own.n else ""
    return verdict, f"{label}: {words}.{left_out}"


def _verdict(
    base: str | None, own: Paired, d: Paired, corrected: float, tests: int, up: bool | None
) -> tuple[str, str]:
    if base is None:
        return "baseline", f"the baseline, {own.mean:.4g} in {_many(own.n, 'seed')}"
    if not d.n:
        return "no comparison", f"no seed gave a finite number both here and in {base}"
    against = f"{d.mean:+.3g} against {base}"
    if d.n == 1:
        return "one seed", f"{against} in the one seed that both have, which may be chance; run 5 seeds or more"
    interval = f"{against} (95 % interval {d.low:+.3g} to {d.high:+.3g}, {_many(d.n, 'seed')})"
    word = {True: ("better", "worse"), False: ("worse", "better"), None: ("higher", "lower")}[up][d.mean < 0]
    if corrected < 0.05:
        return word, f"{word}, {interval}" + f", also after the correction for {tests} comparisons" * (tests > 1)
    unclear = "not distinguishable"
    if d.p < 0.05:
        alone = f"{word} if it were the only comparison, but not after the correction for {tests} (Holm)"
        return unclear, f"{alone}: {interval}"
    if d.spread == 0:
        return unclear, f"equal to {base} in every one of {_many(d.n, 'seed')}"
    more = "over a thousand more seeds" if d.more is None else f"about {_many(d.more, 'more seed')}"
    take = f"a difference of this size would take {more} to show" if d.more != 0 else "more seeds would show it"
    return unclear, f"{unclear}, {interval}; {take}"


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"
