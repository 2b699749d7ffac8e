"""Several processes: a cluster on this machine and its supervisor, and what a task of any cluster does. Host code."""
