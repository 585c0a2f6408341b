from cp_mesh.inference.cache import ShardedCache as ShardedCache
from cp_mesh.inference.decoding import decode as decode
