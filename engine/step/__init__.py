"""One training step on a replica: its batch, its gradients, its random samples, what a run asks of it."""
