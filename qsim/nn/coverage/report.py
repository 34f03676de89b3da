"""The result of a coverage run: each product with its multiply-adds and the points that rounded its operands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from qsim.text.blocks import shared_names
from qsim.text.columns import aligned
from qsim.text.percentages import percent


@dataclass(frozen=True)
class CountedProduct:
    """A product of a program; calls that do not differ are counted together.

    Attributes:
        module: The path of the module that called it; empty for the model itself.
        direction: `forward` or `backward`.
        operator: The operator that computed it, such as `addmm`.
        shapes: The shapes of its operands.
        calls: How often it was computed.
        multiply_adds: The multiply-adds of all calls.
        points: The points that rounded its operands, such as `act=e4m3`.
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
class Coverage:
    """All products that a model computed in one run; prints as a table.

    Attributes:
        products: The products, in the order of their first calls.
        never_called: The names of the layers that have points and were not called.
        opaque: Operators of other packages that ran. They may multiply inside, which is not counted.

    Example:
        >>> import torch, qsim
        >>> model = qsim.convert(torch.nn.Linear(4, 2), qsim.FivePoint(act="e4m3", weight="e4m3"))
        >>> found = qsim.coverage(model, torch.ones(3, 4))
        >>> found.multiply_adds, found.share, found.never_called
        (48, 0.5, ())
    """

    products: tuple[CountedProduct, ...]
    never_called: tuple[str, ...]
    opaque: tuple[str, ...]

    @property
    def multiply_adds(self) -> int:
        """The multiply-adds of all products."""
        return sum(product.multiply_adds for product in self.products)

    @property
    def share(self) -> float:
        """The share of the multiply-adds whose operands were all rounded."""
        return self._share(lambda product: not product.reason)

    @property
    def partial_share(self) -> float:
        """The share of the multiply-adds in products with a rounded and an unrounded operand."""
        return self._share(lambda product: bool(product.points and product.reason))

    def _share(self, counts: Callable[[CountedProduct], bool]) -> float:
        return sum(product.multiply_adds for product in self.products if counts(product)) / self.multiply_adds

    def to_dict(self) -> dict[str, Any]:
        """Everything in plain values, for JSON."""
        shares = {"multiply_adds": self.multiply_adds, "share": self.share, "partial_share": self.partial_share}
        lists = {"never_called": list(self.never_called), "opaque": list(self.opaque)}
        return shares | lists | {"products": [_plain(asdict(product)) for product in self.products]}

    def headline(self) -> str:
        """The shares in one line."""
        shares = f"both operands rounded: {percent(self.share)}, one of them: {percent(self.partial_share)}"
        return f"{self.multiply_adds:,} multiply-adds; {shares}"

    def table(self) -> str:
        """A line with the shares, a row for each product, and what the rows do not show.

        Modules of repeated blocks share their rows, with `*` for the numbers of the blocks, if all of them compute the same products.
        """
        products = [*dict.fromkeys(self._by_block())]
        width = max(len(f"{product.multiply_adds:,}") for product in products)
        rows = [("module", "pass", "operator", "operands", "calls", "multiply-adds", "rounded at")]
        rows += [
            (
                product.module or "(the model)",
                product.direction,
                f"{product.operator} ({product.by})" if product.by else product.operator,
                ", ".join("×".join(map(str, shape)) or "scalar" for shape in product.shapes),
                str(product.calls),
                f"{product.multiply_adds:>{width},}",
                "; ".join(part for part in (", ".join(product.points), product.reason) if part),
            )
            for product in products
        ]
        notes = {"never called": self.never_called, "operators that may multiply inside, not counted": self.opaque}
        lines = [f"{note}: {', '.join(names)}" for note, names in notes.items() if names]
        return "\n".join([self.headline(), aligned(rows), *lines])

    def _by_block(self) -> Iterator[CountedProduct]:
        """The products under the names of the table's rows, with the calls of all blocks that share a name."""
        facts: dict[str, frozenset[CountedProduct]] = {}
        for product in self.products:
            facts[product.module] = facts.get(product.module, frozenset()) | {replace(product, module="")}
        shown = shared_names(facts)
        for product in self.products:
            name, count = shown[product.module]
            yield replace(product, module=name, calls=count * product.calls, multiply_adds=count * product.multiply_adds)

    def __str__(self) -> str:
        return self.table()


def _plain(facts: dict[str, Any]) -> dict[str, Any]:
    """Facts with lists in place of tuples, as JSON returns them."""
    return facts | {"shapes": [list(shape) for shape in facts["shapes"]], "points": list(facts["points"])}
