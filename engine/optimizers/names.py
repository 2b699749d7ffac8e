"""Checks the names of optimizers and schedules and of their arguments; errors name the nearest. Host code."""

import difflib
import inspect

from ..step import ranges


def unknown(kind, found, known):
    """Returns a ValueError that says which `kind` was asked for and which of `known` are nearest to it."""
    known = sorted(known)
    nearest = difflib.get_close_matches(found.lower(), known, n=3, cutoff=0.5)
    cure = f"did you mean {' or '.join(nearest)}?" if nearest else f"use {', '.join(known) or '-'}"
    return ValueError(f"unknown {kind} {found!r}; {cure}")


def parameters(function):
    """Returns by name what `function` (or a class, with what its bases' constructors take) accepts by name."""
    functions = (
        [vars(base)["__init__"] for base in reversed(function.__mro__) if "__init__" in vars(base)]
        if inspect.isclass(function)
        else [function]
    )
    named = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return {
        name: parameter
        for each in functions
        for name, parameter in inspect.signature(each).parameters.items()
        if parameter.kind in named and name != "self"
    }


def check_arguments(owner, arguments, known, intervals):
    """Raises a ValueError for the first of `arguments` that is not among `known`, or lies outside its interval."""
    for name, value in arguments.items():
        if name not in known:
            raise unknown(f"argument of {owner}", name, known)
        if fault := ranges.outside(intervals, name, value):
            raise ValueError(f"{owner}: {fault}")
