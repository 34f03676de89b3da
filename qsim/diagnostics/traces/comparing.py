"""Comparing a run with a trace while it runs: each tensor is compared when it is computed, and kept no longer than that."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from qsim.diagnostics.traces.calls import CallResults, OperationCall
from qsim.diagnostics.traces.comparison import TensorDifference
from qsim.diagnostics.traces.measures import error, relative, ulps
from qsim.diagnostics.traces.trace import Operation, Trace

#: The roles of tensors that belong to a parameter.
_OF_PARAMETERS = ("grad", "updated")


@dataclass
class Again:
    """A tensor as the other run's operation computes it from the first run's inputs.

    Attributes:
        value: The tensor.
        exact: The same with exact sums, in the other run and in the first; `None` if unknown.
    """

    value: Tensor
    exact: tuple[Tensor, Tensor] | None


@dataclass
class Comparer:
    """A recorder that compares the run that reports to it with a trace.

    Args:
        reference: The trace of the first run.
        state: The checksums of the other run's parameters and buffers.
        calls: The first run's calls by title, if it can still compute.
        updated: Computes the other run's updated parameters from the first run's gradients, if there is an optimizer.
    """

    reference: Trace
    state: Mapping[str, str]
    calls: Mapping[str, OperationCall] = field(default_factory=dict)
    updated: Callable[[], Mapping[str, Tensor]] | None = None
    differences: list[TensorDifference] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    _of_parameters: list[str] = field(default_factory=list)
    _operations: dict[str, Operation] = field(default_factory=dict)
    _users: dict[str, str] = field(default_factory=dict)
    _again: dict[str, Again | None] = field(default_factory=dict)

    def called(self, call: OperationCall, inputs: Mapping[int, Tensor], outputs: Mapping[int, Tensor]) -> None:
        """Compare a call's outputs, and repeat it with the first run's inputs."""
        title = call.operation.title
        if self._begin(call.operation):
            given, upstream = self.reference.numbered(title, "input"), self.reference.numbered(title, "grad_output")
            own = call.repeated(given, upstream)
            exact = (None, None) if own is None else self._exact(call, given, upstream)
            self._expect(call.operation, own, exact)
        for number, x in outputs.items():
            self.computed(title, f"output.{number}", x)

    def recorded(self, trace: Trace, operation: Operation) -> None:
        """Take note of a call in a trace, which cannot be repeated, but is known to differ by itself if its inputs are equal."""
        if not self._begin(operation):
            return
        title = operation.title
        alike = self._alike(trace, title, "input")
        for role, same in (("output", alike), ("grad_input", alike and self._alike(trace, title, "grad_output"))):
            if same:
                self._again |= {f"{title}/{role}.{number}": Again(x, None) for number, x in trace.numbered(title, role).items()}

    def computed(self, owner: str, role: str, x: Tensor) -> None:
        """Compare a tensor with the first run's."""
        name = f"{owner}/{role}"
        user = self._users.get(owner, owner)
        if role in _OF_PARAMETERS:
            self._of_parameters.append(name)
        if role.startswith("grad_output") or name not in self.reference.tensors or user not in self._operations:
            return
        if role == "updated" and self.updated is not None:
            self._again |= {f"{each}/updated": Again(value, None) for each, value in self.updated().items()}
            self.updated = None
        self.differences.append(self._difference(self._operations[user], _tensor(user, owner, role), self.reference.tensors[name], x, name))

    def only(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return what only one run has: operations, and gradients of parameters for which the other run computes none."""
        operations = self.reference.operations
        only_a, only_b = [title for title in operations if title not in self.seen], list(self.only_b)
        listed = {name for title in only_a for name in operations[title].state}
        first = [name for name in self.reference.order if name.rpartition("/")[2] in _OF_PARAMETERS]
        for role in _OF_PARAMETERS:
            a, b = ([name for name in names if name.endswith(f"/{role}")] for names in (first, self._of_parameters))
            if a and b:  # otherwise a run has no backward pass, or no optimizer
                only_a += [name.replace("/", ".") for name in a if name not in b and name.rpartition("/")[0] not in listed]
                only_b += [name.replace("/", ".") for name in b if name not in a and name.rpartition("/")[0] in self._users]
        return tuple(only_a), tuple(only_b)

    def _begin(self, operation: Operation) -> bool:
        """Whether the first run has an operation; it counts as the user of its parameters."""
        title = operation.title
        if title not in self.reference.operations:
            self.only_b.append(title)
            return False
        self.seen.add(title)
        self._operations[title] = operation
        for name in operation.state:
            self._users.setdefault(name, title)
        return True

    def _exact(
        self, call: OperationCall, given: Mapping[int, Tensor], upstream: Mapping[int, Tensor]
    ) -> tuple[CallResults | None, CallResults | None]:
        """The results with exact sums of the other run's operation and of the first run's, for the first run's inputs."""
        other = call.exact(given, upstream)
        first = self.calls.get(call.operation.title)
        if other is None or first is not None:
            return other, None if first is None or other is None else first.exact(given, upstream)
        return other, self._assumed(call.operation, other)

    def _assumed(self, operation: Operation, other: CallResults) -> CallResults | None:
        """The exact results of a recorded operation: those of the other run if both are set alike, else what was recorded."""
        title = operation.title
        before = self.reference.operations[title]
        a, b = _settings(before, operation)
        if a == b and not self._state_differs(operation):
            return other
        if "accumulate=" in before.settings:
            return None  # the sums of the recorded run are not exact, and cannot be repeated
        parameters = {name: self.reference.tensors.get(f"{name}/grad") for name in other.parameters}
        return CallResults(
            self.reference.numbered(title, "output"),
            self.reference.numbered(title, "grad_input"),
            {name: x for name, x in parameters.items() if x is not None},
        )

    def _expect(self, operation: Operation, own: CallResults | None, exact: tuple[CallResults | None, CallResults | None]) -> None:
        """Keep the repeated results for the tensors that they belong to."""
        if own is None:
            self._again |= {f"{name}/grad": None for name in operation.state}
            return
        other, first = exact
        for role in ("output", "grad_input"):
            for number, x in _of(own, role).items():
                pair = None if other is None or first is None else (_of(other, role).get(number), _of(first, role).get(number))
                self._again[f"{operation.title}/{role}.{number}"] = Again(x, _both(pair))
        for name, x in own.parameters.items():
            pair = None if other is None or first is None else (other.parameters.get(name), first.parameters.get(name))
            self._add(f"{name}/grad", Again(x, _both(pair)))

    def _add(self, name: str, more: Again) -> None:
        """Add an operation's share of the gradient of a parameter that several may use."""
        if name in self._again:
            former = self._again[name]
            exact = former and former.exact and more.exact and (former.exact[0] + more.exact[0], former.exact[1] + more.exact[1])
            self._again[name] = former and Again(former.value + more.value, exact or None)
        else:
            self._again[name] = more

    def _difference(self, operation: Operation, tensor: str, a: Tensor, b: Tensor, name: str) -> TensorDifference:
        """The record of a tensor."""
        before = self.reference.operations[operation.title]
        call = f" #{operation.call}" if operation.call > 1 else ""
        facts = (operation.layer, f"{operation.name or before.name}{call}", tensor)
        settings = _settings(before, operation)
        again = self._again.pop(name, None)
        if a.shape != b.shape:
            cause, unknown = f"shapes {tuple(a.shape)} and {tuple(b.shape)}", math.nan
            return TensorDifference(*facts, math.inf, math.inf, unknown, unknown, unknown, unknown, cause, settings)
        size = relative(error(a, b), a)
        own = operands = accumulation = inherited = 0.0 if size == 0 and again is None else math.nan
        if again is not None:
            arises = error(a, again.value)
            own, inherited = relative(arises, a), relative(error(again.value, b), a)
            if again.exact is not None:
                rounded = error(again.exact[1], again.exact[0]).to(arises.device)
                operands, accumulation = relative(rounded, a), relative(arises - rounded, a)
        cause = self._cause(operation, settings, size, own)
        return TensorDifference(*facts, size, ulps(a, b), own, operands, accumulation, inherited, cause, settings)

    def _cause(self, operation: Operation, settings: tuple[str, str], size: float, own: float) -> str:
        if size == 0:
            return ""
        if own == 0:
            return "inherited"
        if self._state_differs(operation):
            return "state"
        return "settings" if settings[0] != settings[1] else "arithmetic" if own > 0 else "unknown"

    def _state_differs(self, operation: Operation) -> bool:
        return any(self.reference.state.get(name) != self.state.get(name) for name in operation.state)

    def _alike(self, trace: Trace, title: str, role: str) -> bool:
        """Whether the tensors of an operation in a role are equal in both traces."""
        a, b = self.reference.numbered(title, role), trace.numbered(title, role)
        return bool(a) and a.keys() == b.keys() and all(a[n].shape == b[n].shape and not error(a[n], b[n]).any() for n in a)


def _settings(a: Operation, b: Operation) -> tuple[str, str]:
    """The settings of an operation in both runs; the options of points if layers print alike."""
    return (a.settings, b.settings) if a.settings != b.settings else (a.points, b.points)


def _of(results: CallResults, role: str) -> Mapping[int, Tensor]:
    return results.outputs if role == "output" else results.inputs


def _both(pair: tuple[Tensor | None, Tensor | None] | None) -> tuple[Tensor, Tensor] | None:
    return None if pair is None or pair[0] is None or pair[1] is None else (pair[0], pair[1])


def _tensor(user: str, owner: str, role: str) -> str:
    """The name of a tensor of an operation: its role, or the parameter's name with the role."""
    if user == owner:
        return role.removesuffix(".0")
    layer = user.partition("#")[0].partition(":")[0]
    return f"{owner.removeprefix(layer + '.') if layer else owner}.{role}"
