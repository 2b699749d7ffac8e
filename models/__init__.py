"""Models, one file a family, found by their module's name: each has a class `Model`, a `Trainer`."""
