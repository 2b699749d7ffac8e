"""Several workers that train in step: their strategy, who is lost, stuck or slow. Runs on the host."""
