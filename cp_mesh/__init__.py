"""Exact context-parallel attention on DTensor and DeviceMesh."""

from cp_mesh.attention import attention
from cp_mesh.layouts import Contiguous, Permuted, Striped, ZigZag
from cp_mesh.masks import Mask

__all__ = ["Contiguous", "Mask", "Permuted", "Striped", "ZigZag", "attention"]
