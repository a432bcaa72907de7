"""The strategies by name; this file is read before torch is."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StrategyInfo:
    name: str
    about: str
    averaging: str | None = None
    served: bool = False  # by parameter servers
    divided: bool = False  # no rank has the whole model


TABLE = {
    info.name: info
    for info in (
        StrategyInfo("sequential", "one process, no communication: what all others must equal"),
        StrategyInfo("allreduce", "data parallel; gradients averaged by the transport's own all-reduce", "allreduce"),
        StrategyInfo("ring", "data parallel; scatter-reduce and all-gather around a ring", "ring"),
        StrategyInfo("reduce-bcast", "data parallel; summed up a tree to rank 0, sent down again", "reduce-bcast"),
        StrategyInfo("gather", "data parallel; rank 0 collects every gradient, averages, sends back", "gather"),
        StrategyInfo("ps-sync", "parameter server; waits for all workers, averages, steps once", served=True),
        StrategyInfo("ps-async", "parameter server; applies each worker's gradient as it comes", served=True),
        StrategyInfo("ps-bounded", "parameter server; workers may be --staleness updates ahead", served=True),
        StrategyInfo("pipeline", "the model's layers cut into --stages; micro-batches flow through them", divided=True),
        StrategyInfo("tensor", "each wide layer split over --tensor workers", divided=True),
    )
}
AVERAGINGS = tuple(info.averaging for info in TABLE.values() if info.averaging)
DIVIDED = tuple(info.name for info in TABLE.values() if info.divided)
