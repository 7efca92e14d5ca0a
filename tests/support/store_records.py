"""Records of a scheduler's store."""

from __future__ import annotations

from psdist import optim
from psdist.consistency import SSP
from psdist.types import (
    GroupRange,
    Layout,
    ParametersEntry,
    ParametersMember,
    ParametersSpec,
    Replica,
    Shard,
    TensorSpec,
)
from psdist_scheduler.decide.cluster_state import (
    Member,
    Node,
    ParametersRecord,
)

LAYOUT = Layout((TensorSpec("w", (3, 4), "float16"), TensorSpec("b", ())))
ENTRY = ParametersEntry(
    ParametersSpec("mlp", optim.Adam(lr=1e-3, overrides=(optim.override("b", lr=0.1),)), SSP(3), slice_elements=4096),
    LAYOUT.total,
    (Shard(Replica("server-0", 3), 2, (Replica("server-1", 1),), (Replica("server-2", 1),)),),
    (ParametersMember("worker-0", 1, 0, 7),),
    (GroupRange(12, 13, 1),),
    True,
    LAYOUT.digest,
    2,
)
RECORD = ParametersRecord(ENTRY, LAYOUT, "worker-0")
MEMBER = Member("worker-0", "worker", 1, 0, 2, "", "box", 42)
NODE = Node("agent", "box", 2, 0, 0, 1, 4, "box:7000")
