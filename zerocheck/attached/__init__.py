"""Checks of chosen steps of a real training run, and the replay of their findings."""
