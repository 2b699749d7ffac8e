"""Brings each step its batch: cached on devices, read on the host, or streamed, by a feed in a file of its name.

Made on the host; a feed's operands and batches are computed in its pipeline, the compiled loop or the step.
"""
