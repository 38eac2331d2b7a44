"""Buttons and sliders at any moment of a training: nothing is refused without a reason, torn, or left running."""

from __future__ import annotations

import math
import random
import threading

import pytest
import torch

from mpkit.explorers.scaling import LiveExplorer, SteeredScaler
from mpkit.explorers.start import StartExplorer, train_step
from mpkit.policies import ScalePolicy
from mpkit.widgets.scaling import live_view
from mpkit.widgets.start import start_view

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
