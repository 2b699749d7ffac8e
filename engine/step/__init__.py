"""A training step: batch, gradients, samples, options. Replica code; its runner and options are made on the host."""
