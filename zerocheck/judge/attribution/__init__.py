"""Attribution: what wrong values are made of, without a list of known bugs.

A gradient is solved for as a combination of what exists, an update as a change of the optimizer's
step, and copies are looked up by value, bit for bit. What is said is verified on every element.
Nothing is computed unless an obligation is violated.

- `by_use.py`: attribution of the gradient of a parameter that a forward uses several times
- `carried.py`: provenance of buffers, data position, random states and loss scale after a load
- `cells.py`: cells of an observed vector: the elements of one tensor that ranks hold alike
- `copies.py`: provenance of copies that ranks hold, and that are not what they were to be
- `counts.py`: provenance of wrong step counts, and of other single numbers of a training
- `cover.py`: choice of the fewest hypotheses that account for every wrong element
- `exchanged.py`: attribution of a gradient to shards of other ranks
- `exports.py`: provenance of exported tensors that are not what the shards hold
- `facts.py`: facts on wrong values, merged over roles and ranks into one sentence
- `forwards.py`: provenance of the parameters behind a wrong loss
- `gradient.py`: attribution of a wrong gradient: the combination of known vectors that it is
- `guard.py`: guard of attribution: a bug in it costs a sentence, and neither a verdict nor the run
- `known_vectors.py`: known vectors of a case: models before training or a load, states of steps,
  shards of ranks
- `loaded.py`: provenance of a state that was loaded, or restored, and is not the right one
- `mixtures.py`: attribution of a gradient whose elements come from several places: ranges
- `moved.py`: moved values: a transposed or exchanged tensor, shards in another order, shifts and
  strides
- `norm.py`: attribution of a wrong norm: how often each part of the gradient counts in it
- `places.py`: words for the places of elements: tensor classes, shards of ranks, and ranges
- `roundings.py`: attribution of a gradient that is right, or right times a number, but for other
  roundings
- `saving.py`: provenance of what saving changed in the state of a training
- `sentences.py`: sentence of the tables that ranks have for a tensor: the operation that is wrong
- `table.py`: table of weights: the linear combination of known vectors that an observed one is
- `tensors.py`: words for a set of tensors: their class, or their names
- `transformed.py`: transformed forms of the right values: 0, rounded, scaled, offset or negated
- `values.py`: values by bit pattern: named vectors, and the places where they have given bits
- `vector.py`: provenance of the wrong elements of one flat vector
- `wrong_gradient.py`: sentence of what a wrong reduced gradient is made of
"""
