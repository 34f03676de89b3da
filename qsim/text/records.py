"""Results: sequences of records that print as tables, and go to JSON, pandas and TensorBoard."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar, overload

from qsim.text.blocks import shared_names
from qsim.text.columns import aligned
from qsim.text.percentages import percent

if TYPE_CHECKING:
    from typing_extensions import Self

R = TypeVar("R")
#: Values of a record by their titles: attributes, or functions of the record.
Values = Mapping[str, str | Callable[[Any], Any]]


class Writer(Protocol):
    """The interface of a TensorBoard writer."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any:
        """Take a number of a step."""


@dataclass(frozen=True)
class Records(Sequence[R], Generic[R]):
    """Records of one kind, and facts about all of them: the type of what diagnostics, coverage and conversions return.

    It is a sequence: iterate over it, take `len`, an index or a slice, which is a result of the same kind. Records also have keys, such as
    the names of a layer and a point.

    Attributes:
        records: The records.

    Example:
        >>> import torch, qsim
        >>> model = qsim.convert(torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1)), qsim.FivePoint(act="e4m3"))
        >>> with qsim.diagnostics.Monitor(model) as monitor:
        ...     y = model(torch.tensor([[1.0, 500.0], [0.0, 1e-9]]))
        ...     monitor.step()
        >>> sample = monitor.samples[0]
        >>> len(sample), sample["0", "act"].saturated, [counts.layer for counts in sample.filter(point="act")]
        (2, 1, ['0', '1'])
        >>> print(sample.table(by="saturated", rows=1))
        step 0
        layer  point  quantizer  elements  saturated  underflowed    exact     zero  NaN     SQNR
        0      act    e4m3              4    25.00 %      25.00 %  50.00 %  25.00 %  0 %  19.7 dB
    """

    records: tuple[R, ...]

    #: The columns of the table, in which a float is a share, and those that end at the right.
    COLUMNS: ClassVar[Values] = {}
    RIGHT: ClassVar[tuple[str, ...]] = ()
    #: Whether the table has their titles.
    HAS_TITLES: ClassVar[bool] = True
    #: The fields by which a record is looked up; the first one names a layer.
    KEY: ClassVar[tuple[str, ...]] = ("layer", "point")
    #: What records are ranked by: the largest numbers are the worst.
    LOSSES: ClassVar[Values] = {}
    #: What records are called in `to_dict`.
    NAME: ClassVar[str] = "records"

    def __len__(self) -> int:
        return len(self.records)

    @overload
    def __getitem__(self, place: int | tuple[str, ...]) -> R: ...
    @overload
    def __getitem__(self, place: slice) -> Self: ...
    def __getitem__(self, place: Any) -> Any:
        """A record by its index or its key, or a slice."""
        if isinstance(place, slice):
            return replace(self, records=self.records[place])
        if isinstance(place, int):
            return self.records[place]
        names = self._key()
        if not isinstance(place, tuple) or len(place) != len(names):
            raise TypeError(f"{type(self).__name__}: a key is {' and '.join(names)}, an index or a slice, got {place!r}")
        for record in self.records:
            if self.key(record) == place:
                return record
        keys = [self.key(record) for record in self.records]
        depth = next(depth for depth in range(len(place)) if not any(key[: depth + 1] == place[: depth + 1] for key in keys))
        known = dict.fromkeys(repr(key[depth]) for key in keys if key[:depth] == place[:depth])
        at = f" at {', '.join(map(repr, place[:depth]))}" if depth else ""
        raise KeyError(f"no {names[depth]} {place[depth]!r}{at}: there are {', '.join(known) or 'none'}")

    def key(self, record: R) -> tuple[Any, ...]:
        """Return the key of a record."""
        return tuple(_value(record, name) for name in self._key())

    def filter(self, where: Callable[[R], bool] = lambda record: True, **equal: Any) -> Self:
        """The records for which a function is true and fields have given values, as in `found.filter(point="grad")`."""
        kept = (r for r in self.records if where(r) and all(_value(r, name) == value for name, value in equal.items()))
        return replace(self, records=tuple(kept))

    def ranking(self, by: str) -> list[tuple[R, float]]:
        """Records and what they are ranked by, from the worst to the best; NaN comes last.

        Raises:
            ValueError: If records are not ranked by that.
        """
        known = self._losses()
        if by not in known:
            raise ValueError(f"by: must be one of {', '.join(known) or 'nothing'}; got {by!r}")
        losses = [(record, float(_value(record, known[by]))) for record in self.records]
        return sorted(losses, key=lambda pair: math.inf if math.isnan(pair[1]) else -pair[1])

    def worst(self, by: str) -> Self:
        """Records, from the worst to the best; see `ranking`."""
        return replace(self, records=tuple(record for record, _ in self.ranking(by)))

    def by_block(self) -> list[tuple[R, int]]:
        """The records, with one for repeated blocks about which the same is reported, and the number of these blocks.

        Its name has `*` in place of the number of the block.
        """
        facts: dict[str, frozenset[R]] = {}
        for record in self.records:
            name = self.key(record)[0]
            facts[name] = facts.get(name, frozenset()) | {self._renamed(record, "")}
        shown = shared_names(facts)
        pairs = ((record, *shown[self.key(record)[0]]) for record in self.records)
        return list(dict.fromkeys((self._renamed(record, name), count) for record, name, count in pairs))

    def _renamed(self, record: Any, name: str) -> R:
        return replace(record, **{self.KEY[0]: name})  # type: ignore[no-any-return]

    def table(self, by: str | None = None, rows: int | None = None) -> str:
        """The records as a human-readable table.

        Args:
            by: What to rank them by, the worst first; see `worst`. In their own order by default.
            rows: The number of rows; all by default.
        """
        titles = [list(self._columns())] if self.HAS_TITLES else []
        right = [place for place, title in enumerate(self._columns()) if title in self._right()]
        return "\n".join(filter(None, [*self._above(), aligned([*titles, *self._cells(by, rows)], right=right), *self._below()]))

    def markdown(self, by: str | None = None, rows: int | None = None) -> str:
        """Records as a table in Markdown; see `table`.

        Example:
            >>> import torch, qsim
            >>> print(qsim.nn.conversion(qsim.convert(torch.nn.Sequential(torch.nn.Linear(2, 4)), "e4m3")).markdown())
            | layer | kind | points |
            | --- | --- | --- |
            | 0 | Linear | act=e4m3, weight=e4m3, grad=e4m3 |
        """
        titles = list(self._columns())
        cells = [[*line, *[""] * (len(titles) - len(line))] for line in self._cells(by, rows)]
        return "\n".join(
            "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in (titles, ["---"] * len(titles), *cells)
        )

    def _cells(self, by: str | None, rows: int | None) -> list[list[str]]:
        """The texts of the table, without titles."""
        blocks = self._blocks()
        shown = (blocks if by is None else blocks.worst(by))[:rows]
        last = [record for record in self.totals() if record not in self.records]
        return [self._line(record) for record in (*shown, *last)]

    def _line(self, record: R) -> list[str]:
        """The texts of a record."""
        return [_text(_value(record, value)) for value in self._columns().values()]

    def _columns(self) -> Values:
        return self.COLUMNS

    def _right(self) -> Collection[str]:
        return self.RIGHT

    def _losses(self) -> Values:
        return self.LOSSES

    def _key(self) -> tuple[str, ...]:
        return self.KEY

    def _blocks(self) -> Self:
        """The records that the table shows: those of repeated blocks may share one."""
        return self

    def totals(self) -> Sequence[R]:
        """Records about all layers together."""
        return ()

    def _above(self) -> list[str]:
        """Lines above the table."""
        return []

    def _below(self) -> list[str]:
        """Lines below it."""
        return []

    def __str__(self) -> str:
        return self.table()

    def rows(self) -> list[dict[str, Any]]:
        """A plain dictionary of scalars for each record, with the facts about all of them."""
        facts = {field.name: getattr(self, field.name) for field in fields(self)[1:]}
        common = {name: plain(fact) for name, fact in facts.items() if not isinstance(fact, (tuple, Records))}
        return [{**common, **_scalars(record)} for record in self.records]

    def to_dict(self) -> dict[str, Any]:
        """Everything in plain values, for JSON."""
        lists = {field.name: plain(getattr(self, field.name)) for field in fields(self)[1:] if getattr(self, field.name) != ()}
        return {**lists, self.NAME: [plain(record) for record in self.records]}

    def to_json(self, indent: int | None = None) -> str:
        """Everything as JSON, in one line or indented by a number of spaces."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    def to_pandas(self) -> Any:
        """The rows as a `pandas.DataFrame`.

        Raises:
            ImportError: If pandas is not installed.
        """
        try:
            import pandas  # type: ignore[import-not-found,import-untyped,unused-ignore]
        except ImportError as error:
            raise ImportError("to_pandas needs pandas, which is not installed: pip install pandas") from error
        return pandas.DataFrame(self.rows())

    def aggregates(self) -> dict[str, Any]:
        """Numbers about all layers together, without the ends of intervals."""
        return {tag: number for tag, number in self._numbers(self.totals()).items() if not tag.endswith(("_low", "_high"))}

    def _numbers(self, records: Iterable[R]) -> dict[str, Any]:
        scalars = {"/".join(map(str, self.key(record))): _scalars(record) for record in records}
        return {f"{place}/{name}": number for place, numbers in scalars.items() for name, number in numbers.items()}

    def log(self, writer: Writer, step: int, *, details: bool = False) -> None:
        """Write the aggregates to a TensorBoard writer; with `details`, also the numbers of each record."""
        for tag, number in (self.aggregates() | (self._numbers(self.records) if details else {})).items():
            if isinstance(number, (int, float)) and not isinstance(number, bool) and math.isfinite(number):
                writer.add_scalar(tag, number, step)


def plain(value: Any) -> Any:
    """A record or a value in dictionaries, lists, strings and numbers: what is not finite is `None`, an interval three numbers.

    Example:
        >>> from qsim.diagnostics import BatchFactor, Estimate
        >>> plain({"bias": Estimate(1.0, 0.5, math.inf), "shape": (2, 3)})
        {'bias': 1.0, 'bias_low': 0.5, 'bias_high': None, 'shape': [2, 3]}
    """
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        flat: dict[str, Any] = {}
        for name, part in value.items():
            inner = plain(part)
            has_interval = isinstance(inner, dict) and "value" in inner
            flat |= {name if key == "value" else f"{name}_{key}": each for key, each in inner.items()} if has_interval else {name: inner}
        return flat
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _value(record: Any, value: str | Callable[[Any], Any]) -> Any:
    if not isinstance(value, str):
        return value(record)
    return record.get(value, "") if isinstance(record, Mapping) else getattr(record, value)


def scientific(name: str) -> Callable[[Any], str]:
    """A column of numbers of any size; zero is shown as 0, and NaN, where there is none, as a dash."""

    def text(record: Any) -> str:
        number = getattr(record, name)
        return "-" if math.isnan(number) else "0" if number == 0 else f"{number:.1e}"

    return text


def _text(value: Any) -> str:
    return percent(value) if isinstance(value, float) else str(value)


def _scalars(record: Any) -> dict[str, Any]:
    """The scalars of a record, those of its summary if it has one."""
    given: dict[str, Any] = record.summary() if hasattr(record, "summary") else plain(record)
    return given
