"""Shows runs to people: the page that `crankshaft monitor` serves and `crankshaft report` writes. Runs on the host."""
