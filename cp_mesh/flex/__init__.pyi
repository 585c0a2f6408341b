from cp_mesh.flex.block_mask import create_block_mask as create_block_mask
