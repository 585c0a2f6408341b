from cp_mesh.tools.explain.step import explain_step as explain_step
from cp_mesh.tools.verification.verify import VerificationError as VerificationError
from cp_mesh.tools.verification.verify import verify as verify
from cp_mesh.tools.warming import warm_up as warm_up
