"""Observation of a live step: hooks from its beginning to its end.

- `clip_hooks.py`: hooks into the clipping of gradients in a step: what was clipped, to which limit
- `exchanges.py`: collectives that a model calls in its forward and backward, beyond those of what
  wraps it
- `moved_buffers.py`: buffers that the script moves outside of the forward, such as the bias of a
  router of experts
- `used_gradients.py`: gradients that an optimizer has used, until they are cleared or added to
- `watch.py`: observe one step: copy the state around it, and the gradient where the optimizer takes
  it
"""
