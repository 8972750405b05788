"""One object per layer prologue, built once: all that a step needs besides its own tensors, and the way it runs.

Model, backend, record, cache and workspace are settled when a layer is built, and what does not fit is refused there.
A step then projects into what attention reads, and touches what has to change:

- With a workspace the projection writes its padded, interleaved or packed place; nothing is copied. Layers of a stream
  share one, in order: a query is read before the next layer's step.
- Without one the projection is a plain matmul, and one launch moves its result into a new padded tensor. Where
  attention takes the rank's heads as they are, there is nothing to move either. The bits are the same.

Epsilons are the geometry's: ``dataclasses.replace`` it where a checkpoint says otherwise.
"""

from .dsa import DsaPrologue, IndexerParts
from .v4 import V4Prologue

__all__ = ["DsaPrologue", "IndexerParts", "V4Prologue"]
