"""Causes of a violation: each known bug is computed and compared, none is guessed.

- `axes.py`: causes of errors along the axes of a mesh
- `buffers.py`: known causes of a wrong buffer, each computed and compared
- `by_tensor.py`: causes of a wrong gradient tensor by tensor, where no one cause explains every
  wrong tensor
- `clip.py`: known causes of a wrong norm or a wrongly clipped gradient, each computed
- `communication.py`: known causes of unpredicted collectives, each applied to the prediction
- `evidence.py`: inputs and results of a counterfactual of a wrong gradient, shared by its
  candidates
- `gradient.py`: known causes of a wrong gradient, each computed and compared, none guessed
- `loss.py`: known causes of wrong losses, each computed and compared bit for bit
- `memory_order.py`: causes of a wrong gradient of non-contiguous parameters: elements in the
  order of memory
- `named.py`: switch of the list of known causes: what attribution says by itself is seen without it
- `ownership.py`: known causes of shards that do not tile their tensors, from all shards of a role
- `peak.py`: known causes of a peak above the predicted one
- `placement.py`: causes of a gradient whose elements are right but misplaced: swapped or shifted
  shards
- `publish.py`: known causes of copies that differ between ranks, compared bit for bit
- `ranks.py`: causes of a wrong gradient in which ranks are left out, or did not wait
- `resume.py`: known bugs of saving and loading that explain wrong state after a load
- `rounding.py`: causes of a wrong gradient of which something was rounded to a narrower format:
  terms of the sum over ranks, or its result
- `unwritten.py`: NaN from memory that was never written: ranks of a case fill such memory with it
- `update.py`: changes of the optimizer's step that give a wrong update
- `weights.py`: known bugs as weights of local gradients: some count too often, too little, or not
  at all
"""
