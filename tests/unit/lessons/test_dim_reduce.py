"""*Dimension reduction*: losses and steps by hand in NumPy, trials within the picture; its answers a second way."""

from itertools import pairwise

import numpy as np
import pytest

from mpkit.boost.dim_reduce import pca_matrix
from mpkit.data import digits
from mpkit.lessons.dim_reduce import STEPS, DigitsLoss, components, contours, descent, on_plane, reduced_path, tried
from mpkit.view.page import Page
from mpkit.view.words import words

WORDS = words("dim_reduce")


def tanh_network(flat, images, labels):
    """(loss, gradient) of 64-12-10 with tanh, by hand in NumPy."""
    shapes = (12, 64), (12,), (10, 12), (10,)
    w1, b1, w2, b2 = (part.reshape(shape) for part, shape in zip(np.split(flat, [768, 780, 900]), shapes))
    hidden = np.tanh(images @ w1.T + b1)
    logits = hidden @ w2.T + b2
    chance = np.exp(logits - logits.max(1, keepdims=True))
    chance /= chance.sum(1, keepdims=True)
    back = (chance - np.eye(10)[labels]) / len(images)
    inner = (back @ w2) * (1 - hidden**2)
    parts = inner.T @ images, inner.sum(0), back.T @ hidden, back.sum(0)
    return -np.log(chance[np.arange(len(images)), labels]).mean(), np.concatenate([p.ravel() for p in parts])


@pytest.fixture(scope="module")
def data():
    images, labels = (t[:300].numpy() for t in digits("train", size=8))
    return images.reshape(300, 64).astype(np.float64), labels


def test_the_earlier_path_and_its_components_by_hand(data):
    path = [DigitsLoss().flat()]
    for _ in range(STEPS):
        path.append(path[-1] - 0.5 * tanh_network(path[-1], *data)[1])
    np.testing.assert_allclose(reduced_path(0).weights, path, atol=1e-9)
    np.testing.assert_allclose(reduced_path(0).losses, [tanh_network(w, *data)[0] for w in path], atol=1e-9)
    points = np.array(path)[::2]
    axes = np.linalg.svd(points - points.mean(0), full_matrices=False)[2][:16]
    np.testing.assert_allclose(np.abs((axes * components()).sum(1)), 1, atol=1e-6)
    assert np.allclose(on_plane(reduced_path(0).weights[0]), 0)


@pytest.mark.parametrize(("k", "alpha"), [(2, 0.001), (2, 0.2), (8, 0.0), (16, 0.001)])
def test_a_run_by_hand(k, alpha, data):
    seen, weights = descent(k=k, alpha=alpha).numbers, reduced_path(k, alpha=alpha).weights
    axes = components()[:k]
    for step in (0, 3, 10, 39):
        loss, gradient = tanh_network(weights[step], *data)
        assert seen["losses"][step] == pytest.approx(loss, abs=1e-9)
        inside = np.linalg.norm(axes @ gradient) / np.linalg.norm(gradient)
        assert seen["outside"][step] == pytest.approx(np.sqrt(max(0, 1 - inside**2)), abs=1e-6)
        moved = np.linalg.norm(axes @ (weights[step + 1] - weights[step]))
        assert (moved > 1e-6) == (seen["size"][step] > 0)


def test_what_the_lesson_says_of_stuck_and_freed_runs():
    assert descent(k=8).numbers["losses"][-1] < 0.2 * reduced_path(0).losses[-1]
    assert descent(k=8).numbers["size"][10] == 0.55
    assert descent(k=8).numbers["outside"][30] > 0.98
    lost = descent(k=2).numbers
    assert not lost["size"][5:].any()
    assert lost["losses"][-1] > reduced_path(0).losses[-1]
    assert descent(k=2, alpha=0.2).numbers["size"][30:].any()
    moved = reduced_path(0).weights - reduced_path(0).weights.mean(0)
    share = ((moved @ components().T) ** 2).sum(0).cumsum() / (moved**2).sum()
    assert share[2] > 0.99
    assert share[1] == pytest.approx(0.998, abs=5e-4)
    assert (WORDS["predict"]["directions"]["right"], WORDS["predict"]["stuck"]["right"]) == ("a", "c")
    assert lost["losses"][[5, 40]] == pytest.approx([1.83, 1.82], abs=0.005)
    assert reduced_path(0).losses[[0, 40]] == pytest.approx([2.3, 0.56], abs=0.06)


@pytest.mark.parametrize("k", [2, 5, 14])
@pytest.mark.parametrize("alpha", [0.0, 0.2])
def test_weights_and_trials_are_in_the_picture_or_told_to_lie_beyond_it(k, alpha):
    view, path = descent(k=k, alpha=alpha), reduced_path(k, alpha)
    (taken, refused), now = tried(path), on_plane(path.weights)
    plane = view.sheet.panels[0].given
    low, high = (np.array([plane[axis][end] for axis in "xy"]) for end in ("lo", "hi"))

    def within(points):
        return ((low - 1e-9 <= points) & (points <= high + 1e-9)).all(-1)

    assert within(now).all()
    assert within(taken[np.isfinite(taken).all(-1)]).all()
    outside = np.isfinite(refused).all(-1) & ~within(refused)
    np.testing.assert_array_equal(view.numbers["beyond"], outside.sum(1))
    for t, search in enumerate(path.searches):
        places = [now[t] + size * search.direction.numpy()[:2] for size in (1.0, 0.55)[: len(search.losses)]]
        found = np.concatenate([refused[t], taken[t]])
        np.testing.assert_allclose(found[np.isfinite(found).all(-1)], places)
        assert np.isfinite(taken[t]).any() == search.accepted
        if search.accepted and alpha == 0:
            assert taken[t][len(places) - 1] == pytest.approx(now[t + 1], abs=1e-9)


def test_a_line_of_equal_loss_lies_on_that_loss(data):
    for level, line in contours().items():
        x, y = line[len(line) // 2 - 1] if np.isfinite(line[len(line) // 2 - 1]).all() else line[0]
        weights = reduced_path(0).weights[0] + np.array([x, y]) @ components()[:2]
        assert tanh_network(weights, *data)[0] == pytest.approx(level, abs=0.05)


def test_answers_a_second_way():
    truth = {name: q["truth"] for name, q in WORDS["question"].items()}
    cost = {f"{search.rho:g}": len(search.losses) for search in reduced_path(8).searches}
    assert truth["passes"] == 25 * cost["1"] + 9 * cost["0.55"] + 6 * cost["0"]
    accepted = [search.accepted for search in reduced_path(8, alpha=0.0).searches]
    assert truth["stuck"] == sum(accepted[accepted.index(False) :])
    samples = np.random.default_rng(0).normal(size=(5, 40))
    rows = pca_matrix(samples, 4, method="full")
    assert all(a > b for a, b in pairwise(np.linalg.norm((samples - samples.mean(0)) @ rows.T, axis=0)))
    assert truth["samples"] == np.sum(np.linalg.svd(samples - samples.mean(0))[1] > 1e-9)


def test_cases_of_the_task():
    for (rows, step), expected in WORDS["task"]["cases"]:
        rows = np.array(rows)
        assert (rows @ rows.T == np.eye(len(rows))).all()
        assert (rows.T @ (rows @ np.array(step))).tolist() == expected


def test_the_page_knows_the_rate_of_0_by_the_word_of_its_choice():
    assert Page(descent(alpha=0.0)).state["values"]["alpha"] == "0.0"
