"""The process of a worker or server that executes a coordinator's requests. Runs on the host."""
