"""Data drawn from a seed, with a truth planted in it. Host code."""
