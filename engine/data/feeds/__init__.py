"""Brings each step its batch: resident on devices, read on the host, or streamed.

Made on the host; a feed's operands and batches are computed in its pipeline, the compiled loop or the step.
"""
