"""Context parallelism for models of Transformers, with the models' own attention settings.

`root` has the public functions, and the forward that replaces the model's: it reads the arguments for the whole batch
(`inputs`) and shards them. Attention and masks use the interfaces of Transformers (`masks`). Losses become shares of
this rank (`losses`). `families` checks which models are supported.
"""

from cp_mesh.integrations.transformers.root import parallelize, sequence_of

__all__ = ["parallelize", "sequence_of"]
