"""Collectives of each implementation, predicted before anything is wrapped.

`trace.py` sees in which order the bare model, on one device and without any sharder, comes to the
modules that are units, and its backward to their outputs, inputs and parameters. Each other file
has the rules of one sharder, which turn that into calls: when it gathers, and when it reduces.
"""
