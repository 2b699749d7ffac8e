"""One training step on a replica: its batch, its gradients, its random draws, what a run asks of it."""
