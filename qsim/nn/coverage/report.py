"""The result of a coverage run: each product with its multiply-adds and the points that rounded its operands."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from qsim.text.percentages import percent
from qsim.text.records import Records, Values


@dataclass(frozen=True)
class CountedProduct:
    """A product of a program; calls that do not differ are counted together.

    Attributes:
        module: Path of the module that called it; empty for the model itself.
        direction: `forward` or `backward`.
        operator: Operator that computed it, such as `addmm`.
        shapes: Shapes of its operands.
        calls: How often it was computed.
        multiply_adds: Multiply-adds of all calls.
        points: Points that rounded its operands, such as `act=e4m3`.
        reason: Why an operand was not rounded; empty if all were.
        by: Where a product with an accumulator was computed: `chip` or `emulator`; empty for others, and on the meta device.

    Example:
        >>> import torch, qsim
        >>> model = qsim.convert(torch.nn.Linear(4, 2), qsim.FivePoint(act="e4m3"))
        >>> product = qsim.coverage(model, torch.ones(3, 4), backward=False).products[0]
        >>> product.shapes, product.multiply_adds, product.points, product.reason
        (((3, 4), (4, 2)), 24, ('act=e4m3',), 'no quantizer at weight')
    """

    module: str
    direction: str
    operator: str
    shapes: tuple[tuple[int, ...], ...]
    calls: int
    multiply_adds: int
    points: tuple[str, ...]
    reason: str
    by: str


@dataclass(frozen=True)
class Coverage(Records[CountedProduct]):
    """All products that a model computed in one run; prints as a table.

    Attributes:
        records: Products, in the order of their first calls.
        never_called: Names of the layers that have points and were not called.
        opaque: Operators of other packages that ran. They may multiply inside, which is not counted.

    Example:
        >>> import torch, qsim
        >>> model = qsim.convert(torch.nn.Linear(4, 2), qsim.FivePoint(act="e4m3", weight="e4m3"))
        >>> found = qsim.coverage(model, torch.ones(3, 4))
        >>> found.multiply_adds, found.share, found.never_called
        (48, 0.5, ())
        >>> [(product.operator, product.points) for product in found.filter(direction="forward")]
        [('addmm', ('act=e4m3', 'weight=e4m3'))]
    """

    never_called: tuple[str, ...]
    opaque: tuple[str, ...]

    COLUMNS: ClassVar[Values] = {
        "module": lambda product: product.module or "(the model)",
        "pass": "direction",
        "operator": lambda product: f"{product.operator} ({product.by})" if product.by else product.operator,
        "operands": lambda product: ", ".join("×".join(map(str, shape)) or "scalar" for shape in product.shapes),
        "calls": "calls",
        "multiply-adds": lambda product: f"{product.multiply_adds:,}",
        "rounded at": lambda product: "; ".join(part for part in (", ".join(product.points), product.reason) if part),
    }
    RIGHT: ClassVar[tuple[str, ...]] = ("calls", "multiply-adds")
    KEY: ClassVar[tuple[str, ...]] = ("module", "direction", "operator")
    NAME: ClassVar[str] = "products"
    LOSSES: ClassVar[Values] = {"unrounded": lambda product: product.multiply_adds * bool(product.reason), "multiply_adds": "multiply_adds"}

    @property
    def products(self) -> tuple[CountedProduct, ...]:
        """The products."""
        return self.records

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of all products."""
        return sum(product.multiply_adds for product in self)

    @property
    def share(self) -> float:
        """Share of the multiply-adds whose operands were all rounded."""
        return self.filter(reason="").multiply_adds / self.multiply_adds

    @property
    def partial_share(self) -> float:
        """Share of the multiply-adds in products with a rounded and an unrounded operand."""
        return self.filter(lambda product: bool(product.points and product.reason)).multiply_adds / self.multiply_adds

    def aggregates(self) -> dict[str, Any]:
        """Multiply-adds, and both shares."""
        return {"multiply_adds": self.multiply_adds, "share": self.share, "partial_share": self.partial_share}

    def to_dict(self) -> dict[str, Any]:
        """Everything in plain values, for JSON."""
        return self.aggregates() | {"never_called": [], "opaque": []} | super().to_dict()

    def headline(self) -> str:
        """Shares in one line."""
        shares = f"both operands rounded: {percent(self.share)}, one of them: {percent(self.partial_share)}"
        return f"{self.multiply_adds:,} multiply-adds; {shares}"

    def _blocks(self) -> Coverage:
        """Modules of repeated blocks that compute the same products share them, with the calls of all."""
        shared = (
            replace(product, calls=count * product.calls, multiply_adds=count * product.multiply_adds) for product, count in self.by_block()
        )
        return replace(self, records=tuple(shared))

    def _above(self) -> list[str]:
        return [self.headline()]

    def _below(self) -> list[str]:
        notes = {"never called": self.never_called, "operators that may multiply inside, not counted": self.opaque}
        return [f"{note}: {', '.join(names)}" for note, names in notes.items() if names]
