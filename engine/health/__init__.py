"""Whether a run's processes are well: who is lost, stuck, slow, or holds other values than the rest."""
