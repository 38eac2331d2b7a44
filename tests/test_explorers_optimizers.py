"""Models and views of the lesson on optimizers and schedules, without a browser."""

import itertools
import threading

import pytest
import torch
from scenes import look
from traitlets import Bool, Enum, Float, Int

from mpkit.check import verdict
from mpkit.explorers.optimizers import (
    FORMATS,
    MAKERS,
    PLACES,
    AdamStateExplorer,
    DecayExplorer,
    LossScaleExplorer,
    SchedulesExplorer,
    decayed_weights,
    first_adam_step,
    train_scaled,
    train_with_state,
)
from mpkit.formats import BF16, FP16, FP32
from mpkit.optimizers import Adam
from mpkit.schedules import CosineDecayLR, WarmUpLR
from mpkit.widgets.optimizers import adam_state_view, decay_view, loss_scale_view, schedules_view

VIEWS = {
    "schedules": schedules_view,
    "adam_state": adam_state_view,
    "loss_scale": loss_scale_view,
    "decay": decay_view,
}


@pytest.fixture(params=VIEWS)
def view(request):
    return VIEWS[request.param]()


def extremes(explorer):
    """(name, value) of every control at its ends, and every choice."""
    for name in explorer.controls:
        trait = explorer.traits()[name]
        if isinstance(trait, Enum):
            yield from ((name, value) for value in trait.values)
        elif isinstance(trait, Bool):
            yield from ((name, value) for value in (True, False))
        elif isinstance(trait, Int | Float):
            yield from ((name, value) for value in (trait.min, trait.max))


def test_every_control_works_at_its_ends_and_reset_restores_the_picture(view):
    first = look(view)
    pictures = {first}
    for name, value in extremes(view.explorer):
        view.explorer.set(**{name: value})
        assert view.summary()
        assert view.data()
        pictures.add(look(view))
    assert len(pictures) > len(view.explorer.controls)
    view.press("Reset")
    assert look(view) == first


@pytest.mark.parametrize("name", VIEWS)
def test_equal_settings_give_equal_pictures_and_other_settings_others(name):
    a, b = VIEWS[name](), VIEWS[name]()
    assert look(a) == look(b)
    control = a.explorer.controls[0]
    trait = a.explorer.traits()[control]
    other = next(v for v in getattr(trait, "values", None) or (trait.min,) if v != getattr(a.explorer, control))
    a.explorer.set(**{control: other})
    assert look(a) != look(b)


def test_a_refused_value_changes_nothing(view):
    before, png = view.explorer.state(), look(view)
    name = next(n for n in view.explorer.controls if isinstance(view.explorer.traits()[n], Int))
    with pytest.raises(ValueError, match=name):
        view.explorer.set(**{name: -1000})
    assert view.explorer.state() == before
    assert name in view.explorer.message
    assert look(view) == png


def test_two_threads_leave_a_whole_picture(view):
    name, value = next(
        (n, v) for n, v in extremes(view.explorer) if isinstance(view.explorer.traits()[n], Int) and v == v
    )
    view.explorer.set(**{name: value})
    want = look(view)
    view.press("Reset")
    start = look(view)
    threads = [threading.Thread(target=view.explorer.set, kwargs={name: value}) for _ in range(2)]
    threads += [threading.Thread(target=view.press, args=("Reset",))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert look(view) in (want, start)


def test_schedules_show_what_the_library_computes():
    model = SchedulesExplorer(learning_rate=0.4, decay_steps=20, warmup_steps=10, step=15)
    want = WarmUpLR(0.4, 10).then(CosineDecayLR(0.0, 0.4, 20), at=10)
    assert model.curves["cosine"] == pytest.approx([want(k) for k in range(200)], abs=1e-7)
    assert f"cosine {want(15):.3g}" in model.summary()


def test_the_first_step_in_float32_is_that_of_the_optimizer():
    gradients = torch.exp2(torch.arange(-20.0, 10.0))
    weight = torch.nn.Parameter(torch.zeros_like(gradients))
    weight.grad = gradients
    Adam([weight], 1.0).step()
    torch.testing.assert_close(first_adam_step(gradients, 1e-8, FP32).size, -weight.detach(), rtol=2e-6, atol=0)


def test_a_narrow_state_breaks_where_its_numbers_end():
    steps = first_adam_step(torch.tensor([2.0**-10, 2.0**-2, 2.0**10]), 1e-8, FP16)
    assert steps.eps == 0.0
    assert steps.size[0].isinf()  # v underflows, and so does eps
    assert steps.size[1] == pytest.approx(1, rel=0.02)
    assert steps.size[2] == 0  # g squared overflows
    assert first_adam_step(torch.tensor([2.0**-10]), 1e-8, BF16).size == pytest.approx(1, rel=0.02)
    assert first_adam_step(torch.tensor([2.0**-10]), 1e-4, FP16).size.isfinite()
    model = AdamStateExplorer(gradient_exponent=-10)
    assert "step is inf times" in model.summary()


def test_training_with_a_float16_state_is_lost_at_once_and_saved_by_a_larger_eps():
    by_format = {name: train_with_state(fmt, 1e-8, steps=40) for name, fmt in FORMATS.items()}
    assert torch.tensor(by_format["float16"]["last loss"]).isnan()
    assert by_format["float32"]["last loss"] < 1
    assert by_format["bfloat16"]["last loss"] < 1
    assert train_with_state(FP16, 1e-4, steps=40)["last loss"] < 1


def test_decoupled_decay_does_not_depend_on_the_size_of_the_gradient():
    large, small = decayed_weights(1.0), decayed_weights(0.001)
    assert small["AdamWeightDecay"] == pytest.approx(large["AdamWeightDecay"], abs=0.01)
    assert small["SGD"] == pytest.approx(large["SGD"], abs=0.01)
    assert small["Adam"] < 0.1 < 0.8 < large["Adam"]


@pytest.mark.parametrize("kind", MAKERS)
def test_equal_scales_train_as_none_and_unequal_ones_hurt_all_but_adam(kind):
    plain, agreed, apart = train_scaled(kind, 1, 1), train_scaled(kind, 1024, 1024), train_scaled(kind, 1024, 1)
    assert agreed == plain  # powers of two are exact
    assert (apart[-1] > 2 * plain[-1]) == (kind != "Adam")
    model = LossScaleExplorer(optimizer=kind, scale_exponent=0)
    assert model.losses == apart
    assert "1024 times" in model.summary()


RIGHT = {
    ("07", "square"): -7,
    ("07", "lost"): 1,
    ("07", "factor"): 16,
    ("21", "warmup"): 0.3,
    ("21", "decayed"): ["bn.weight", "fc.bias"],
    ("21", "listed"): 0.01,
}


@pytest.mark.parametrize(("lesson", "name"), RIGHT, ids="-".join)
def test_questions_know_right_from_wrong(lesson, name):
    right = RIGHT[lesson, name]
    assert verdict(lesson, name)[0] is None
    assert verdict(lesson, name, right)[0] is True
    for wrong in (-8, 0.1, ["conv.weight"], 0.5):
        good, sentence = verdict(lesson, name, wrong)
        assert good is False
        assert sentence.startswith("Not yet. ")


def test_what_is_switched_off_is_not_said_to_act():
    """Moved by nothing, by no decay, or by a decay that is another group's: the sentence says which."""
    for place, rate, decay in itertools.product(PLACES, (0.0, 0.01), (0.0, 0.1)):
        parameter = "bn.gamma" if rate and decay else "fc.bias"
        model = DecayExplorer(parameter=parameter, place=place, learning_rate=rate, weight_decay=decay, size=1e-4)
        assert ("it is not trained" in model.reach) == (place == PLACES[3])
        assert ("moves nothing" in model.reach) == (rate == 0 and place != PLACES[3])
        assert ("decay reaches it" in model.reach) == (model.curves["SGD"][-1] < 0.99), model.state()
        assert ("outside of this group" in model.summary()) == (place == PLACES[2])
