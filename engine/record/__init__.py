"""The record of a run: its events, and where its seconds went. Runs on the host."""
