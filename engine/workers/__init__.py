"""Several workers that train in step: their strategy, what they exchange, who is lost or stuck. Runs on the host."""
