"""HTML and SVG as trees: a result's strings become text, which can be no markup. Host code."""

from __future__ import annotations

import re
from xml.etree import ElementTree

Element = ElementTree.Element
# Characters that XML can't hold, not even escaped: control characters, halves of surrogate pairs.
_UNPRINTABLE = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def element(tag: str, *children: Element | str | None, **attributes: str | float) -> Element:
    """Makes <tag attributes>children</tag>.

    Args:
      tag: its name.
      *children: elements, texts as they stand, or None for nothing.
      **attributes: by name, `_` for `-`, with an `_` at the end where Python keeps the word for itself (`class_`);
        numbers to two places.
    """
    made = Element(tag, {name.rstrip("_").replace("_", "-"): _value(value) for name, value in attributes.items()})
    append(made, *children)
    return made


def append(parent: Element, *children: Element | str | None) -> None:
    """Appends elements and texts to a parent."""
    for child in children:
        if child is None:
            continue
        if not isinstance(child, str):
            parent.append(child)
        elif len(parent):
            parent[-1].tail = (parent[-1].tail or "") + _printable(child)
        else:
            parent.text = (parent.text or "") + _printable(child)


def document(root: Element) -> str:
    """Returns a whole HTML document."""
    return "<!DOCTYPE html>\n" + ElementTree.tostring(root, encoding="unicode", method="html") + "\n"


def _value(value: str | float) -> str:
    return _printable(value) if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")


def _printable(text: str) -> str:
    return _UNPRINTABLE.sub("\ufffd", text)
