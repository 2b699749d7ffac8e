"""What `Trainer` shows to people who subclass it: few names, and what a step may ask for."""

from __future__ import annotations

import pytest

from crankshaft import Trainer


def test_a_trainer_has_at_most_19_public_members():
    """Methods, properties and attributes of the class; `tf.Module`'s own are not its face."""
    members = sorted(name for name in vars(Trainer) if not name.startswith("_"))
    assert len(members) <= 19, members
    assert set(Trainer.__annotations__) <= set(members)


def test_a_property_that_lacks_an_attribute_names_that_attribute():
    class Mine(Trainer):
        @property
        def trainable_variables(self):
            return self.modell.trainable_variables

    mine = Mine()
    with pytest.raises(AttributeError, match="'Mine' object has no attribute 'modell'"):
        mine.trainable_variables  # noqa: B018 - it raises
