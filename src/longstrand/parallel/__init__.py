"""Many ranks: the mesh and what ranks exchange. Knows tensors and groups, not our layers."""

from longstrand.parallel.agreement import by_first, from_all, from_first, said_once, together
from longstrand.parallel.axis import Axis
from longstrand.parallel.dispatch import Spread, experts_over
from longstrand.parallel.mesh import Mesh, all_ranks, make_mesh, one_process
from longstrand.parallel.parts import as_stored, like_sharded, local_part
from longstrand.parallel.processes import run_ranks
from longstrand.parallel.segments import Deal, deal

__all__ = [
    "Axis",
    "Deal",
    "Mesh",
    "Spread",
    "all_ranks",
    "as_stored",
    "by_first",
    "deal",
    "experts_over",
    "from_all",
    "from_first",
    "like_sharded",
    "local_part",
    "make_mesh",
    "one_process",
    "run_ranks",
    "said_once",
    "together",
]
