"""Faults injected at the collectives: they apply to any implementation, a user's own included.

`zerocheck/catalogue.py` has their names, and how an implementation with one is spelled.
"""
