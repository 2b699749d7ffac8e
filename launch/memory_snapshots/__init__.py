"""Snapshots in memory that outlive their process: who holds them, and who saves them. Runs on the host."""
