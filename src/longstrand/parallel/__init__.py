"""Many ranks: the mesh and what ranks exchange. Knows tensors and groups, not our layers."""

from longstrand.parallel.axis import Axis
from longstrand.parallel.dispatch import Spread, experts_over
from longstrand.parallel.mesh import Mesh, make_mesh, one_process
from longstrand.parallel.processes import run_ranks
from longstrand.parallel.segments import Deal, deal

__all__ = ["Axis", "Deal", "Mesh", "Spread", "deal", "experts_over", "make_mesh", "one_process", "run_ranks"]
