"""What other systems are given to run a cluster: Slurm's scripts, Kubernetes' objects."""
