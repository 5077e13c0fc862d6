"""Many ranks: the mesh and what ranks exchange. Knows tensors and groups, not our layers."""

from longstrand.parallel.agreement import by_first, from_all, from_first, said_once, together
from longstrand.parallel.axis import Axis
from longstrand.parallel.mesh import Mesh, make_mesh, one_process
from longstrand.parallel.processes import run_ranks
from longstrand.parallel.segments import Deal, deal

__all__ = [
    "Axis",
    "Deal",
    "Mesh",
    "by_first",
    "deal",
    "from_all",
    "from_first",
    "make_mesh",
    "one_process",
    "run_ranks",
    "said_once",
    "together",
]
