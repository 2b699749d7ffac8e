"""Shows runs: the page of `crankshaft monitor` and `report`, and Prometheus's figures. Runs on the host."""
