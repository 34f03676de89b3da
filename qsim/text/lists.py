"""Lists in the text of an option: words between commas."""

from __future__ import annotations


def words(text: str) -> list[str]:
    """The words between commas, except for commas within the parentheses of a call.

    Example:
        >>> words("h100_fp8, Promoted(Aligned(8, 20), 16)")
        ['h100_fp8', 'Promoted(Aligned(8, 20), 16)']
    """
    depth, found = 0, [""]
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            found.append("")
        else:
            found[-1] += letter
    return [word.strip() for word in found if word.strip()]
