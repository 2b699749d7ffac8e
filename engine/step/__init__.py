"""One training step: its batch, gradients, random samples and options. Runs on the replica, except `options`."""
