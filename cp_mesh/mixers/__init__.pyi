from cp_mesh.mixers.rules import Options as Options
from cp_mesh.mixers.rules import causal_conv1d as causal_conv1d
from cp_mesh.mixers.rules import delta_rule as delta_rule
from cp_mesh.mixers.rules import gated_delta_rule as gated_delta_rule
from cp_mesh.mixers.rules import gla as gla
from cp_mesh.mixers.rules import kda as kda
from cp_mesh.mixers.rules import roll as roll
from cp_mesh.mixers.rules import ssd as ssd
from cp_mesh.mixers.rules import token_shift as token_shift

__all__: list[str]
