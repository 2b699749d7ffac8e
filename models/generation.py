"""`Generates`, where programs imported it before."""

from ..engine.generation import Generates

__all__ = ["Generates"]
