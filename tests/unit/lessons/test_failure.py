"""The real failure: what is recorded holds what the lessons say, and its edge is that of float16."""

import numpy as np
import torch

from mpkit.lessons import failure


def test_float16_without_a_scale_stays_at_chance_and_with_one_learns():
    """One in ten is chance, and ln 10 = 2.303 its loss. One of five seeds breaks loose, late."""
    ways = list(dict.fromkeys(run["way"] for run in failure.recorded()["runs"]))
    right = {way: np.array([run["accuracy"] for run in failure.trainings()[way]]) for way in ways}
    assert all(len(values) == 5 for values in right.values())
    alone = right.pop("float16, no scale")
    loss = np.array([run["losses"][-1] for run in failure.trainings()["float16, no scale"]])
    stuck = alone < 15
    assert stuck.sum() == 4
    assert abs(loss[stuck] - np.log(10)).max() < 0.001
    late = next(r for r in failure.recorded()["runs"] if r["way"] == "float16, no scale" and r["accuracy"] > 15)
    before, after = (late["losses"][step // failure.recorded()["every"]] for step in (500, 600))
    assert before > 2.25 > after
    assert alone.max() < min(values.min() for values in right.values()) + 1
    assert min(values.min() for values in right.values()) > 76


def test_the_network_has_six_layers_of_sigmoids():
    kinds = [type(m).__name__ for m in failure.sigmoids()]
    assert kinds.count("Sigmoid") == 6
    assert failure.sigmoids()(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


def test_gradients_walk_off_the_edge_from_the_first_layer_on():
    for step in failure.STEPS:
        found = failure.moment_at(step)
        assert (np.diff(found["zero"][0]) <= 0.02).all()  # the nearer to the output, the fewer
        assert found["zero"][24].max() < 0.05  # a scale brings them back
        assert found["overflow"][40].max() > 0.9  # too large a one throws them out at the other end
    assert failure.moment_at(300)["zero"][0].sum() > failure.moment_at(0)["zero"][0].sum()


def test_float16_loses_more_than_what_lies_below_its_edge():
    """On the way back it rounds at every layer: what is 0 there gives 0 below."""
    found = failure.moment_at(0)
    below = failure.recorded()["lowest"] + np.arange(found["counts"].shape[1]) < -25
    share = found["counts"][:, below].sum(1) / found["counts"].sum(1)
    assert found["zero"][0][0] > share[0] > 0
    assert torch.tensor(2.0**-25).half() == 0 < torch.tensor(2.0**-25 * 1.001).half()


def test_the_view_shows_what_is_recorded():
    seen = failure.edge(scale=16, step=300).numbers
    assert seen["zero"].tolist() == failure.moment_at(300)["zero"][16].tolist()
