"""Buttons and sliders at any moment of a training: nothing is refused without a reason, torn, or left running."""

from __future__ import annotations

import contextlib
import math
import random
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from support import answer, printed, told

import mpkit
from mpkit.explorers.scaling import LiveExplorer, SteeredScaler
from mpkit.explorers.start import StartExplorer, train_step
from mpkit.policies import ScalePolicy
from mpkit.widgets.formats import bits_view
from mpkit.widgets.scaling import dynamics_view, live_view
from mpkit.widgets.start import start_view

HOME = str(Path(mpkit.__file__).parent)
MAKERS = {"start": start_view, "live": live_view}


@pytest.fixture(params=MAKERS)
def view(request):
    made = MAKERS[request.param]()
    made.explorer.steps = 12
    yield made
    made.explorer.stop()
    made.explorer.wait(60)


def whole(explorer) -> bool:
    """Whether the run on screen is one moment of a training."""
    run = explorer.run
    return run is None or (len(run.losses) == len(run.scales) and all(i < len(run.losses) for i in run.skipped))


def test_stop_in_every_state(view):
    explorer = view.explorer
    view.press("Stop")  # before anything
    assert not explorer.busy
    view.press("Train")
    view.press("Stop")  # at once
    view.press("Stop")
    explorer.wait(60)
    stopped = explorer.run
    assert not explorer.busy
    assert stopped is None or stopped.accuracy is None
    view.press("Stop")  # at the end
    view.press("Train")  # an old Stop does not end a new training
    explorer.wait(60)
    assert len(explorer.run.losses) >= 12
    assert explorer.run.accuracy is not None
    assert explorer.progress == 1.0


def test_train_is_taken_the_moment_the_last_one_says_it_is_over(view):
    """In the thread of the old training, which is still drawing its end."""
    explorer, again = view.explorer, []

    def pressed(change):
        if not change["new"] and not again:
            again.append(True)
            explorer.train()

    explorer.observe(pressed, "busy")
    view.press("Train")
    first = explorer._worker
    first.join(60)
    explorer.wait(60)
    assert explorer._worker is not first
    assert explorer.message == ""
    assert explorer.run.accuracy is not None


def test_a_second_train_is_refused_while_one_runs(view):
    view.press("Train")
    view.press("Train")
    refused = view.explorer.message
    view.explorer.wait(60)
    assert "press Stop first" in refused


def test_sliders_while_it_trains_leave_nothing_torn(view):
    """What is drawn at any moment is one moment of the training, and ends as the settings say."""
    explorer, torn = view.explorer, []
    explorer.observe(lambda _: torn.append(explorer.run) if not whole(explorer) else None, "revision")
    rng = random.Random(0)
    view.press("Train")
    moves = 0
    while explorer.busy and moves < 200:
        explorer.set(scale_factor=rng.randint(2, 16), scale_window=rng.randint(1, 240))
        assert whole(explorer)
        assert view.state["scale_factor"] == explorer.scale_factor
        moves += 1
    explorer.wait(60)
    assert torn == []
    assert len(explorer.run.losses) >= 12
    assert str(explorer.scale_factor) in explorer.summary()


@pytest.mark.parametrize("name", MAKERS)
def test_two_views_on_one_explorer_show_the_same(name):
    first = MAKERS[name]()
    second = type(first)(first.explorer, first.scene)
    first.explorer.set(scale_factor=5)
    assert second.state["scale_factor"] == 5
    second.ask({"scale_window": 7})
    assert first.state == second.state
    assert first.spec == second.spec
    assert first.sentence == second.sentence
    first.unobserve_all() if hasattr(first, "unobserve_all") else None
    first.close()  # as when its cell is run again
    second.ask({"scale_window": 9})
    assert "9" in second.sentence[0]


def test_a_kick_never_comes_between_multiplying_and_dividing():
    """Hundreds of kicks from another thread: each step's gradients are divided by what multiplied its loss."""
    torch.manual_seed(0)
    network = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(network.parameters(), 0.0)
    images, labels = torch.randn(8, 4), torch.arange(8) % 3
    torch.nn.functional.cross_entropy(network(images), labels).backward()
    want = [p.grad.clone() for p in network.parameters()]
    scaler, over = SteeredScaler(lambda: ScalePolicy.fixed(2.0**8)), threading.Event()

    def kicks():
        while not over.is_set():
            scaler.kick(2.0)
            scaler.kick(0.5)
            time.sleep(1e-4)  # or each step waits for the interpreter

    thread = threading.Thread(target=kicks)
    thread.start()
    try:
        for _ in range(100):
            _, finite = train_step(network, optimizer, scaler, images, labels)
            assert finite
            for p, grad in zip(network.parameters(), want):
                torch.testing.assert_close(p.grad, grad, rtol=1e-6, atol=1e-8)
    finally:
        over.set()
        thread.join()
    scaler.kick(4.0)
    scaler.kick(4.0)
    before = float(scaler.scale_value)
    scaler.adjust(torch.tensor(True))
    assert math.log2(float(scaler.scale_value) / before) >= 3  # both, and at most one kick that was under way


def test_a_training_that_fails_can_be_started_again(monkeypatch):
    explorer = StartExplorer()

    def broken():
        raise RuntimeError("no memory")
        yield 0.0

    explorer.start(broken)
    explorer.wait(60)
    assert (explorer.busy, explorer.message) == (False, "RuntimeError: no memory")
    live = LiveExplorer()
    live.steps = 2
    live.train()
    live.wait(60)
    assert live.message == ""
    assert len(live.run.losses) == 2


# --- the kernel is interrupted, or started again


def lines_of(call, at=0):
    """Run `call` and count its lines in mpkit; before line number `at` comes an interrupt, as Ctrl-C brings it."""
    count, before = 0, sys.gettrace()

    def trace(frame, event, _):
        nonlocal count
        if not frame.f_code.co_filename.startswith(HOME):
            return None
        count += event == "line"
        if event == "line" and count == at:
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        with torch.enable_grad():  # an interrupt between the last line of a no_grad and its end leaves that on
            call()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize(
    ("make", "name", "values"),
    [(bits_view, "number", ("3", "7")), (dynamics_view, "scale_window", (60, 90)), (dynamics_view, "step", (90, 60))],
    ids=["number", "window", "step"],
)
def test_an_interrupt_at_any_line_leaves_parameters_results_and_picture_of_one_moment(make, name, values):
    view, calm = make(), make()
    count = lines_of(lambda: calm.ask({name: values[0]}))
    for at in random.Random(0).sample(range(1, count), min(40, count - 1)):
        with contextlib.suppress(KeyboardInterrupt):
            lines_of(lambda: view.ask({name: values[0]}), at)
        with view.explorer.lock:
            calm.explorer.set(**view.explorer.state())
        assert view.explorer.summary() == calm.explorer.summary()
        view.ask({name: values[1]})
        calm.ask({name: values[1]})
        assert (view.spec, view.kept, view.sentence) == (calm.spec, calm.kept, calm.sentence)


SET_UP = """
import time
from mpkit.widgets.scaling import live_view
view = live_view()
explorer = view.explorer
explorer.steps = 10**6
"""
TRAIN = """
view.press("Train")
while explorer.run is None or len(explorer.run.losses) < 3:
    time.sleep(0.01)
print("it trains", flush=True)
"""
# one long sleep would be slept to its end if the signal came between the print and the call
FOR_EVER = "while True: time.sleep(0.05)"


def test_an_interrupted_cell_leaves_the_training_steerable_and_a_restart_ends_it(kernel):
    manager, client = kernel
    assert answer(client, SET_UP) == ""
    client.execute(TRAIN + FOR_EVER, stop_on_error=False)
    printed(client, "it trains")
    manager.interrupt_kernel()
    assert client.get_shell_msg(timeout=120)["content"]["ename"] == "KeyboardInterrupt"
    asked = told(client, "view.ask({'scale_factor': 5})", "f'{explorer.busy} {view.sentence[0]}'")
    assert asked.startswith("'True Set to factor 5"), asked
    losses = told(client, "", "explorer.run.losses[:3]")
    stop = "view.press('Stop'); explorer.wait(120)"
    assert told(client, stop, "explorer.busy, explorer.message") == "(False, '')"
    # pressed again, it begins anew
    assert told(client, "explorer.run = None" + TRAIN, "explorer.run.losses[:3]") == losses

    manager.restart_kernel()  # while that training runs
    client.wait_for_ready(timeout=120)
    assert told(client, "view", "0") == "NameError"
    assert told(client, SET_UP + TRAIN, "explorer.run.losses[:3]") == losses
    assert told(client, stop, "explorer.busy") == "False"
