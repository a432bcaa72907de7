"""How gradients are divided into buckets; no torch, because predictions use it, too."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def assign(parameters: Sequence[tuple[Hashable, int, int]], limit: int) -> list[int]:
    """The bucket of each parameter: of its dtype, the number of its values, and the bytes of a value.

    Consecutive parameters of a dtype share a bucket until that has at least `limit` bytes.

    >>> assign([("a", 3, 4), ("b", 1, 8), ("a", 1, 4), ("a", 5, 4)], 16)
    [0, 1, 0, 2]
    """
    filling: dict[Hashable, tuple[int, int]] = {}  # of each dtype: the bucket, and its values
    found, buckets = list[int](), 0
    for dtype, values, itemsize in parameters:
        bucket, filled = filling.get(dtype, (-1, 0))
        if bucket < 0 or filled >= max(1, limit // itemsize):
            bucket, filled, buckets = buckets, 0, buckets + 1
        filling[dtype] = bucket, filled + values
        found.append(bucket)
    return found


def together(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Which gradients of these bytes are summed at once, in this order: each large one alone, small ones together.

    >>> together([1, 9, 2, 3, 1], 5)
    [[1], [0, 2, 3], [4]]
    """
    found, small = list[list[int]](), list[int]()
    for number, size in enumerate(sizes):
        if size >= limit:
            found.append([number])
            continue
        small.append(number)
        if sum(sizes[each] for each in small) >= limit:
            found.append(small)
            small = []
    return [*found, small] if small else found


def tail(parameters: int, extras: int, *, sliced: bool = False) -> int:
    """Values that the last bucket has besides gradients: a flag for each parameter, the extras, and two numbers; two
    more if each rank sees only slices of the sums.
    """
    return parameters + extras + 2 + 2 * sliced
