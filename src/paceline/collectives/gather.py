"""Gather every rank's data on rank 0, sum there, and send the sum to each rank (as Singh did)."""

from paceline.collectives.plan import Growth, Plan, Planned, Recv, Send, pieces


def plan(rank: int, ranks: int, length: int) -> Plan:
    """Rank 0 receives (N-1)·S and sends (N-1)·S; every other rank sends S and receives S."""
    spans = list(pieces(range(length)))
    if rank:
        return [*(Send(0, *span) for span in spans), *(Recv(0, *span, add=False) for span in spans)]
    others = range(1, ranks)
    return [
        *(Recv(other, *span, add=True) for span in spans for other in others),
        *(Send(other, *span) for span in spans for other in others),
    ]


GATHER = Planned("gather", plan, Growth.STAR)
