"""One training step on a replica: its batch, gradients, random samples and options."""
