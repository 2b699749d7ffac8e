"""Input for other systems to run a cluster: Slurm's scripts, Kubernetes' objects."""
