from cp_mesh.latent.function import latent_attention as latent_attention
from cp_mesh.latent.indexed import indexed_attention as indexed_attention
from cp_mesh.latent.selection import select_keys as select_keys

__all__: list[str]
