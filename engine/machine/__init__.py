"""The machine that a process runs on: its CPUs, GPUs and files, and the software on it. Runs on the host."""
