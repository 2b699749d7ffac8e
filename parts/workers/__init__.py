"""Workers that train in step: strategy, exchange, who is lost or stuck. Runs on the host; sums are replica code."""
