from cp_mesh.geometry.layouts import Joint as Joint
from cp_mesh.geometry.tensor_layouts import Balanced as Balanced
from cp_mesh.geometry.tensor_layouts import Permuted as Permuted
from cp_mesh.geometry.tensor_layouts import ZigZagDocuments as ZigZagDocuments
