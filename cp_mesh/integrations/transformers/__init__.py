"""Context parallelism for models of Transformers, with what a model itself says of its attention.

`root` has what users call, and the forward that replaces the model's. It reads what a call says of the whole batch
(`inputs`), and shards. Attention and masks come by the interfaces of Transformers (`masks`). Losses become shares of
this rank (`losses`). `families` says which models are served.
"""

from cp_mesh.integrations.transformers.root import parallelize, sequence_of

__all__ = ["parallelize", "sequence_of"]
