"""Several processes: a cluster on this machine and its supervisor, and the tasks of any cluster. Runs on the host."""
