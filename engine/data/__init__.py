"""Defines where examples come from, and in which order they reach the replicas. Runs on the host.

Only what sources, orders and feeds compute in a graph runs elsewhere: in a pipeline, the compiled loop, a replica.
"""
