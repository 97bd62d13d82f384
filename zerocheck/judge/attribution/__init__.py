"""Attribution: what wrong values are made of, without a list of known bugs.

Every wrong value is looked up, bit for bit, in what is known of a training, and the answers are
merged into ranges and into one sentence. Nothing is computed unless an obligation is violated.

- `carried.py`: provenance of buffers, data position, random states and loss scale after a load
- `copies.py`: provenance of copies that ranks hold, and that are not what they were to be
- `counts.py`: provenance of wrong step counts, and of other single numbers of a training
- `cover.py`: choice of the fewest hypotheses that account for every wrong element
- `exports.py`: provenance of exported tensors that are not what the shards hold
- `facts.py`: facts on wrong values, merged over roles and ranks into one sentence
- `forwards.py`: provenance of the parameters behind a wrong loss
- `known_vectors.py`: known vectors of a case: models before training or a load, states of steps,
  shards of ranks
- `loaded.py`: provenance of a state that was loaded, or restored, and is not the right one
- `moved.py`: moved values: a transposed or exchanged tensor, shards in another order, shifts and
  strides
- `places.py`: words for the places of elements: tensor classes, shards of ranks, and ranges
- `saving.py`: provenance of what saving changed in the state of a training
- `transformed.py`: transformed forms of the right values: 0, rounded, scaled, offset or negated
- `values.py`: values by bit pattern: named vectors, and the places where they have given bits
- `vector.py`: provenance of the wrong elements of one flat vector
"""
