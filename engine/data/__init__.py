"""Where examples come from, and in which order they reach replicas. Runs on the host; in a step it is replica code.

Only what sources, orders and feeds compute in a graph runs elsewhere: in a pipeline, the compiled loop, a replica.
"""
