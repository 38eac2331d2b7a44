"""The widget of a prediction: one button for every answer."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

import ipywidgets as w


def told(prediction: Mapping[str, Any], first: str, now: str) -> str:
    """What is said when `now` was chosen, and `first` was the first choice of all: the truth, to whoever predicted."""
    right = prediction["right"]
    words = {letter: word for letter, (_, word) in zip("abcdefgh", prediction["choices"])}
    if now != first:
        return f"Your prediction was ({first}). Of ({now}): {'right. ' if now == right else ''}{words[now]}"
    if now == right:
        return f"You predicted ({now}), and so it is. {words[now]}"
    return f"You predicted ({now}). {words[now]} It is ({right}). {words[right]}"


class Commit(w.VBox):
    """The question with a button for every answer; the first press is the prediction, further ones tell of the others.

    Stored on a page it is the question and its answers: what is right is said to nobody who has not pressed.
    """

    def __init__(self, prediction: Mapping[str, Any]) -> None:
        self.prediction, self.first = prediction, ""
        self.status = w.HTML()
        layout = {"width": "auto", "max_width": "860px", "height": "auto"}
        self.buttons = {
            letter: w.Button(description=f"({letter}) {text}", layout=w.Layout(**layout))
            for letter, (text, _) in zip("abcdefgh", prediction["choices"])
        }
        for letter, button in self.buttons.items():
            button.add_class("mpk-choice")
            button.on_click(lambda _, letter=letter: self.choose(letter))
        prompt = w.HTML(f"<style>{_WRAPPED}</style><b>Predict.</b> {escape(prediction['ask'])}")
        super().__init__([prompt, *self.buttons.values(), self.status])

    def choose(self, letter: str) -> None:
        """Press the button of one answer."""
        self.first = self.first or letter
        self.buttons[self.first].add_class("mpk-chosen")
        self.status.value = f'<div role="status">{escape(told(self.prediction, self.first, letter))}</div>'

    def __repr__(self) -> str:
        answers = [f"  ({letter}) {text}" for letter, (text, _) in zip(self.buttons, self.prediction["choices"])]
        return "\n".join([f"Predict: {self.prediction['ask']}", *answers])

    def _repr_mimebundle_(self, **kwargs: object) -> Any:
        bundle = super()._repr_mimebundle_(**kwargs)
        data = bundle[0] if isinstance(bundle, tuple) else bundle
        return data | {"text/plain": repr(self)}  # ipywidgets cuts it off after 110 characters


# long answers take two lines; the chosen one is framed, as JupyterLab's own colours for it are too pale for their words
_WRAPPED = (
    ".mpk-choice { white-space: normal; line-height: 1.5; padding: 4px 12px; text-align: left; }"
    ".mpk-chosen { font-weight: 600; box-shadow: inset 0 0 0 2px currentColor; }"
)
