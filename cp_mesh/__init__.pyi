"""The public names, and where each is; `cp_mesh._names` reads this file, too."""

from cp_mesh import flex as flex
from cp_mesh import geometry as geometry
from cp_mesh import inference as inference
from cp_mesh import integrations as integrations
from cp_mesh import latent as latent
from cp_mesh import mixers as mixers
from cp_mesh import tensor_parallel as tensor_parallel
from cp_mesh import tools as tools
from cp_mesh import training as training
from cp_mesh import wrap as wrap
from cp_mesh.call.function import attention as attention
from cp_mesh.comm.agreement import check_mode as check_mode
from cp_mesh.errors import ArgumentError as ArgumentError
from cp_mesh.errors import RankMismatchError as RankMismatchError
from cp_mesh.errors import UnsupportedError as UnsupportedError
from cp_mesh.flex.function import flex_attention as flex_attention
from cp_mesh.geometry.balance import balance as balance
from cp_mesh.geometry.batch_mask import batch_mask as batch_mask
from cp_mesh.geometry.batch_mask import document_positions as document_positions
from cp_mesh.geometry.layout import Layout as Layout
from cp_mesh.geometry.layouts import Contiguous as Contiguous
from cp_mesh.geometry.layouts import Striped as Striped
from cp_mesh.geometry.layouts import ZigZag as ZigZag
from cp_mesh.geometry.mask import Mask as Mask
from cp_mesh.sequence.sharded_sequence import ShardedSequence as ShardedSequence
from cp_mesh.tools.explain.explain import explain as explain
from cp_mesh.tools.verification.verify_model import verify_model as verify_model
from cp_mesh.training.checkpointed import Checkpointed as Checkpointed
from cp_mesh.training.clip_grad import clip_grad_norm as clip_grad_norm
from cp_mesh.training.context_parallel import ContextParallel as ContextParallel
from cp_mesh.training.log_probs import token_log_probs as token_log_probs
from cp_mesh.training.loss import cross_entropy as cross_entropy
from cp_mesh.training.parallelize import parallelize as parallelize
from cp_mesh.training.parallelize import sum_gradients as sum_gradients
from cp_mesh.training.probe import probe as probe
from cp_mesh.training.recurrent_parallel import RecurrentParallel as RecurrentParallel
from cp_mesh.training.sharded_model import ShardedModel as ShardedModel
from cp_mesh.training.tiled import TiledMLP as TiledMLP

__version__: str
