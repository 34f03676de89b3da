"""Names of layers in a model's repeated blocks: one name for layers about which the same is reported."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Mapping

#: The number of a block in the name of a layer within it.
_NUMBER = re.compile(r"(?<![^.])\d+(?=\.)")


def shared_names(facts: Mapping[str, Hashable]) -> dict[str, tuple[str, int]]:
    """For each layer the name to show, and how many layers share it.

    Layers whose names differ only in the numbers of blocks share a name, with `*` for the numbers, if the facts about all are equal.

    Args:
        facts: What a table shows of each layer, by the layer's name.

    Example:
        >>> shared_names({"blocks.0.up": "e4m3", "blocks.1.up": "e4m3", "blocks.0.down": "e4m3", "blocks.1.down": "e5m2"})["blocks.0.up"]
        ('blocks.*.up', 2)
        >>> shared_names({"blocks.0.down": "e4m3", "blocks.1.down": "e5m2"})["blocks.0.down"]
        ('blocks.0.down', 1)
    """
    alike = defaultdict(list)
    for name in facts:
        alike[_NUMBER.sub("*", name)].append(name)
    shown = {name: (name, 1) for name in facts}
    for pattern, names in alike.items():
        if len({facts[name] for name in names}) == 1 and len(names) > 1:
            shown |= dict.fromkeys(names, (pattern, len(names)))
    return shown
