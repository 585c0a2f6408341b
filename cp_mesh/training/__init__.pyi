from cp_mesh.training.boundaries import GatherOutput as GatherOutput
from cp_mesh.training.boundaries import ShardInput as ShardInput
from cp_mesh.training.log_probs import document_sums as document_sums
from cp_mesh.training.loss import valid_tokens as valid_tokens
from cp_mesh.training.parallelize import checkpoint_context_fn as checkpoint_context_fn
