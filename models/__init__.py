"""Models, one file a family, found by the module's name. Replica code."""
