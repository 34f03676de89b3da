"""Recurrent layers and cells, step by step: each multiplies its input and its hidden state by a weight, as linear layers do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from qsim.nn import functional
from qsim.nn.calls.points import weight_of

State = tuple[Tensor, ...]
#: The next state, given the product of the input, the product of the hidden state, and the state.
Step = Callable[[Tensor, Tensor, State], State]


def _lstm_step(of_input: Tensor, of_hidden: Tensor, state: State) -> State:
    i, f, g, o = (of_input + of_hidden).chunk(4, -1)
    cell = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell


def _gru_step(of_input: Tensor, of_hidden: Tensor, state: State) -> State:
    (r, z, n), (from_r, from_z, from_n) = of_input.chunk(3, -1), of_hidden.chunk(3, -1)
    new = (n + (r + from_r).sigmoid() * from_n).tanh()
    return (new + (z + from_z).sigmoid() * (state[0] - new),)


def _rnn_step(activation: Callable[[Tensor], Tensor], of_input: Tensor, of_hidden: Tensor, state: State) -> State:
    return (activation(of_input + of_hidden),)


STEPS: dict[str, Step] = {
    "lstm": _lstm_step,
    "gru": _gru_step,
    "rnn_tanh": partial(_rnn_step, torch.tanh),
    "rnn_relu": partial(_rnn_step, torch.relu),
}

#: The two orders in which layers take the steps of a sequence; each undoes itself.
_DIRECTIONS: tuple[Callable[[Sequence[Tensor]], list[Tensor]], ...] = (list, lambda steps: list(reversed(steps)))


def cell(step: Step, input: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None) -> Any:
    """`torch.lstm_cell` and its relatives."""
    if weight_of(w_ih) is None:
        return None
    state = (hx,) if isinstance(hx, Tensor) else tuple(hx)
    found = step(_linear(input, w_ih, b_ih), _linear(state[0], w_hh, b_hh), state)
    return found if len(found) > 1 else found[0]


def layer(step: Step, input: Tensor, *rest: Any) -> tuple[Tensor, ...] | None:
    """`torch.lstm` and its relatives, of a tensor or of a packed sequence."""
    is_packed = isinstance(rest[0], Tensor) and isinstance(rest[2], (list, tuple))
    sizes, (hx, weights, has_biases, layers, dropout, training, both, *batch_first) = (
        (rest[0].tolist(), rest[1:]) if is_packed else (None, rest)
    )
    if weight_of(weights[0]) is None:
        return None
    state = (hx,) if isinstance(hx, Tensor) else tuple(hx)
    x = input.transpose(0, 1) if any(batch_first) else input
    steps = list(x.split(sizes)) if sizes else list(x.unbind(0))
    directions = _DIRECTIONS if both else _DIRECTIONS[:1]
    each = len(weights) // (layers * len(directions))
    finals: list[State] = []
    for i in range(layers):
        outputs = []
        for in_order in directions:
            own = len(finals)
            first, named = tuple(s[own] for s in state), _ordered(weights[own * each : (own + 1) * each], has_biases=has_biases)
            found, final = _direction(in_order(steps), first, named, step)
            outputs.append(in_order(found))
            finals.append(final)
        steps = [torch.cat(parts, -1) for parts in zip(*outputs, strict=True)]
        if i < layers - 1:
            steps = [F.dropout(x, dropout, training) for x in steps]
    result = torch.cat(steps) if sizes else torch.stack(steps, 1 if any(batch_first) else 0)
    return result, *(torch.stack(parts) for parts in zip(*finals, strict=True))


#: The weights of one layer in one direction, those of the input, the hidden state and the projection, and the first two's biases.
RecurrentWeights = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


def _ordered(given: Sequence[Tensor], *, has_biases: bool) -> RecurrentWeights:
    w_ih, w_hh, *others = given
    b_ih, b_hh = others[:2] if has_biases else (None, None)
    projection = others[2:] if has_biases else others
    return w_ih, w_hh, projection[0] if projection else None, b_ih, b_hh


def _direction(steps: Sequence[Tensor], first: State, weights: RecurrentWeights, step: Step) -> tuple[list[Tensor], State]:
    """The hidden states of one layer in one direction, and the last state.

    Sequences of a packed batch end one after another, or begin so in the backward direction.
    """
    sizes, (w_ih, w_hh, w_hr, b_ih, b_hh) = [len(x) for x in steps], weights
    products = _linear(torch.cat(list(steps)), w_ih, b_ih).split(sizes)
    state = tuple(s[: sizes[0]] for s in first)
    ended: list[State] = []
    found = []
    for product in products:
        had, size = len(state[0]), len(product)
        if size < had:
            ended.append(tuple(s[size:] for s in state))
        state = tuple(torch.cat([s, new[had:size]]) if size > had else s[:size] for s, new in zip(state, first, strict=True))
        state = step(product, _linear(state[0], w_hh, b_hh), state)
        if w_hr is not None:
            state = _linear(state[0], w_hr, None), *state[1:]
        found.append(state[0])
    last = tuple(torch.cat(parts) for parts in zip(state, *reversed(ended), strict=True))
    return found, last


def _linear(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    own = weight_of(w)
    return F.linear(x, w, bias) if own is None else functional.linear(x, w, bias, own.points, stream=own.stream)
