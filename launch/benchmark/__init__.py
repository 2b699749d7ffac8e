"""What surrounds a benchmark: its report, comparisons, sweeps, and the standard set (`crankshaft benchmark`)."""
