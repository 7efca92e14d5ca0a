"""Small models that ``convergence`` trains, with numpy alone: digits, and characters of Python's standard library.

A model is a set of pure functions of its weights. Both losses are cross-entropies of a few thousand samples that
training does not see. Both models train in seconds on one core.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from examples import digits

Arrays = dict[str, NDArray[np.float32]]
#: Mean loss of one worker's batch, and the gradient of each tensor.
Gradients = Callable[[Arrays, NDArray[np.int64]], tuple[float, Arrays]]


@dataclass(frozen=True)
class Model:
    """Model of ``convergence``.

    samples: number of training samples.
    gradients: gradients of the samples of these numbers.
    loss: loss of samples that training does not see.
    lr: rates of SGD without momentum, with 0.5 and with 0.9, and of Adam.
    steps: steps of one run.
    """

    name: str
    initial: Callable[[int], Arrays]
    samples: int
    gradients: Gradients
    loss: Callable[[Arrays], float]
    lr: Mapping[str, float]
    steps: int


def _lr(sgd: float, adam: float) -> dict[str, float]:
    """Return a rate per momentum: 0.5 eventually doubles each step, and 0.9 makes it ten times as long."""
    return {"plain": 2 * sgd, "sgd": sgd, "momentum": sgd / 5, "adam": adam}


# --- digits -----------------------------------------------------------------------------------------------------------


@cache
def digits_model() -> Model:
    """Return ``examples/digits.py``: 9,610 parameters. Raises SystemExit without scikit-learn, which has the images."""
    images, labels = digits.load()
    seen, count = digits.TRAIN_IMAGES, len(images)

    def gradients(weights: Arrays, numbers: NDArray[np.int64]) -> tuple[float, Arrays]:
        loss, arrays = digits.gradients(weights, images[numbers], labels[numbers])
        return loss, arrays

    def loss(weights: Arrays) -> float:
        return float(digits.gradients(weights, images[seen:count], labels[seen:count])[0])

    return Model("digits", digits.initial, seen, gradients, loss, _lr(0.5, 3e-3), 600)


# --- characters -------------------------------------------------------------------------------------------------------

_CONTEXT, _EMBEDDING, _HIDDEN = 12, 24, 160
#: Printable ASCII and the end of a line; all other characters share one more number.
_FIRST, _LAST = 32, 126
_SYMBOLS = _LAST - _FIRST + 3
_TEXT_BYTES, _HELD_OUT = 1_000_000, 8192


def symbols(text: bytes) -> NDArray[np.int64]:
    """Return the number of each character."""
    codes = np.frombuffer(text, np.uint8).astype(np.int64)
    numbers = np.where((codes >= _FIRST) & (codes <= _LAST), codes - _FIRST, _SYMBOLS - 1)
    numbers[codes == ord("\n")] = _SYMBOLS - 2
    return numbers


@cache
def characters_model() -> Model:
    """Return a model of the next character of source code from the twelve before it, with 64,185 parameters.

    It is an embedding and two dense layers, as in Bengio et al. 2003.
    """
    library = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(library.glob("*.py")))[:_TEXT_BYTES]
    numbers = symbols(text)
    windows = np.lib.stride_tricks.sliding_window_view(numbers, _CONTEXT + 1)
    order = np.random.default_rng(0).permutation(len(windows))
    held_out, seen = windows[order[:_HELD_OUT]], order[_HELD_OUT:]

    def gradients(weights: Arrays, chosen: NDArray[np.int64]) -> tuple[float, Arrays]:
        return _character_gradients(weights, windows[seen[chosen]])

    def loss(weights: Arrays) -> float:
        probabilities = _forward(weights, held_out[:, :-1])[2]
        return _cross_entropy(probabilities, held_out[:, -1])

    return Model("characters", _initial_characters, len(seen), gradients, loss, _lr(1.0, 2e-3), 3000)


def _initial_characters(seed: int) -> Arrays:
    rng = np.random.default_rng(seed)
    inputs = _CONTEXT * _EMBEDDING
    weights = {
        "embedding": rng.normal(0, 1, (_SYMBOLS, _EMBEDDING)),
        "hidden.w": rng.normal(0, np.sqrt(2 / inputs), (inputs, _HIDDEN)),
        "hidden.b": np.zeros(_HIDDEN),
        "output.w": rng.normal(0, np.sqrt(1 / _HIDDEN), (_HIDDEN, _SYMBOLS)),
        "output.b": np.zeros(_SYMBOLS),
    }
    return {name: value.astype(np.float32) for name, value in weights.items()}


def _forward(weights: Arrays, contexts: NDArray[np.int64]) -> tuple[Arrays, NDArray[np.bool_], NDArray[np.float32]]:
    """Inputs and activations of the hidden layer, which of them are above 0, and the characters' probabilities."""
    inputs = weights["embedding"][contexts].reshape(len(contexts), -1)
    before = inputs @ weights["hidden.w"] + weights["hidden.b"]
    hidden = np.maximum(before, 0)
    scores = hidden @ weights["output.w"] + weights["output.b"]
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    return {"inputs": inputs, "hidden": hidden}, before > 0, scores / scores.sum(axis=1, keepdims=True)


def _cross_entropy(probabilities: NDArray[np.float32], following: NDArray[np.int64]) -> float:
    return float(-np.log(probabilities[np.arange(len(following)), following] + 1e-12).mean())


def _character_gradients(weights: Arrays, windows: NDArray[np.int64]) -> tuple[float, Arrays]:
    contexts, following = windows[:, :-1], windows[:, -1]
    values, active, probabilities = _forward(weights, contexts)
    loss = _cross_entropy(probabilities, following)
    at_output = probabilities
    at_output[np.arange(len(following)), following] -= 1
    at_output /= np.float32(len(following))
    at_hidden = (at_output @ weights["output.w"].T) * active
    at_inputs = (at_hidden @ weights["hidden.w"].T).reshape(-1, _EMBEDDING)
    embedding = np.zeros_like(weights["embedding"])
    np.add.at(embedding, contexts.reshape(-1), at_inputs)
    return loss, {
        "embedding": embedding,
        "hidden.w": values["inputs"].T @ at_hidden,
        "hidden.b": at_hidden.sum(axis=0),
        "output.w": values["hidden"].T @ at_output,
        "output.b": at_output.sum(axis=0),
    }


MODELS: dict[str, Callable[[], Model]] = {"digits": digits_model, "characters": characters_model}
