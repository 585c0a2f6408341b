from cp_mesh.latent.function import latent_attention as latent_attention

__all__: list[str]
