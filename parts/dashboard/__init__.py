"""Shows runs: the page that `crankshaft monitor` serves and `report` writes, and figures for Prometheus."""
