"""Questions of lesson 11."""

from itertools import pairwise

import numpy as np

from mpkit.boost.dim_reduce import pca_matrix
from mpkit.check import Question
from mpkit.check.prediction import Prediction
from mpkit.check.task import Task
from mpkit.explorers.dim_reduce import components, earlier_path, reduced_path


def _passes() -> int:
    cost = {round(search.rho, 2): len(search.losses) for search in reduced_path(8).searches}
    return 25 * cost[1.0] + 9 * cost[0.55] + 6 * cost[0.0]


def _freed() -> int:
    """Steps after the first refused search in which a run without a residual accepted a trial."""
    accepted = [search.accepted for search in reduced_path(8, alpha=0.0).searches]
    return sum(accepted[accepted.index(False) :])


def _meaningful() -> int:
    """How many components of 5 random samples belong to a singular value that is not rounding noise."""
    data = np.random.default_rng(0).normal(size=(5, 40))
    rows = pca_matrix(data, 4, method="full")
    lengths = np.linalg.norm((data - data.mean(axis=0)) @ rows.T, axis=0)
    assert all(a > b for a, b in pairwise(lengths))
    return int(np.sum(np.linalg.svd(data - data.mean(axis=0))[1] > 1e-9))


QUESTIONS = {
    "passes": Question(
        "Of 40 line searches 25 accepted the first trial, 9 the second, and 6 none. How many forward passes did these "
        "searches cost?",
        _passes,
        "25 searches tried once. The other 15 tried twice, and then accepted or gave up: 25 + 2 * 15 = {truth}.",
        "Each trial is one forward pass. How many trials does a search make that accepts none?",
        (
            (61, "A search gives up after the second trial: there is no third."),
            (49, "A search that accepts none has tried twice, too."),
            (40, "That would be so if every search accepted its first trial."),
        ),
    ),
    "stuck": Question(
        "8 components, and alpha is 0. At some step a search refuses both trials for the first time. In how many of "
        "all later steps is a trial accepted?",
        _freed,
        "{truth}: no weight moves, so every later search tries exactly the same two steps, and refuses them again.",
        "Set alpha to 0 in the view and walk through the steps. What could change the next search?",
        (
            (
                lambda v: isinstance(v, int | float) and v > 0,
                "With alpha above 0 the residual moves the weights and can free the search. Here it moves nothing.",
            ),
        ),
    ),
    "samples": Question(
        "You recorded 5 snapshots. How many principal components do they have that are more than rounding noise?",
        _meaningful,
        "Subtracting the mean costs one dimension. `prepare_pca` warns if you ask for as many as there are snapshots.",
        "Two points lie on one line: one direction, not two.",
        ((5, "Two points lie on a line, and three in a plane. How many dimensions do five points need?"),),
    ),
}


def _directions() -> str:
    weights = earlier_path().weights
    moved = weights - weights.mean(axis=0)
    share = ((moved @ components().T) ** 2).sum(axis=0).cumsum() / (moved**2).sum()
    needed = int((share > 0.99).argmax()) + 1
    return "a" if needed <= 3 else "b" if needed <= 60 else "c"


def _projected() -> list[tuple[tuple[list[list[float]], list[float]], list[float]]]:
    rows = [[0.5, 0.5, 0.5, 0.5], [0.5, -0.5, 0.5, -0.5]]  # exact in every format that a reader may compute in
    pairs = (([[1.0, 0.0, 0.0]], [3.0, 4.0, 5.0]), (rows, [1.0, 4.0, 2.0, 8.0]))
    return [((rows, step), (np.array(rows).T @ (np.array(rows) @ np.array(step))).tolist()) for rows, step in pairs]


PREDICTIONS = {
    "directions": Prediction(
        "40 steps of plain gradient descent on 910 weights. How many directions hold 99 % of the movement?",
        (
            (
                "Two or three.",
                "The steps point nearly the same way for a long time, so a few directions hold nearly all of the "
                "movement.",
            ),
            (
                "About 40, one for each step.",
                "40 steps span at most 40 directions, but most of the steps lie almost along the same line.",
            ),
            (
                "Nearly all 910.",
                "40 steps cannot span more than 40 directions, however many weights there are.",
            ),
        ),
        _directions,
    ),
}

TASK = Task(
    "the function gets the components and a step. The components are a list of rows; each row has length 1 and is at "
    "right angles to the others. The step is a list. The function returns the part of the step that lies in the "
    "subspace of the components.",
    _projected,
    "DimReduce only tries steps that lie in this subspace.",
    "The inner product of the step with a row tells how far the step goes along that row. Multiply each row by its "
    "inner product, and add up.",
)
