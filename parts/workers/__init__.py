"""Several workers that train in step: their strategy, what they agree on and exchange, who is lost or stuck."""
