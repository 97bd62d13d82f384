"""Attribution: what wrong values are made of, without a list of known bugs.

A gradient is solved for as a combination of what exists, an update as an edit of the optimizer's
equation, and copies are looked up by value. What is said is verified on every element.

- `by_use.py`: attribution of the gradient of a parameter that a forward uses several times
- `cells.py`: cells of an observed vector: the elements of one tensor that ranks hold alike
- `exchanged.py`: attribution of a gradient to shards of other ranks
- `gradient.py`: attribution of a wrong gradient: the combination of known vectors that it is
- `mixtures.py`: attribution of a gradient whose elements come from several places: ranges
- `roundings.py`: attribution of a gradient that is right, or right times a number, but for other
  roundings
- `sentences.py`: sentence of the tables that ranks have for a tensor: the operation that is wrong
- `table.py`: table of weights: the linear combination of known vectors that an observed one is
- `tensors.py`: words for a set of tensors: their class, or their names
- `update.py`: attribution of a wrong update: the edit of the optimizer's equation that gives it
- `wrong_gradient.py`: sentence of what a wrong reduced gradient is made of
"""
