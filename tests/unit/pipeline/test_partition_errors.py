"""What the search says where there is no cut: what was given, what is missing, by how much, what may help."""

from __future__ import annotations

import pytest
from made_up_profiles import best, chain, node

from paceline.errors import UsageError
from paceline.pipeline.partition import Device, StagePlan, check_fits, equal_layers, equal_parameters, find, plan_at


def test_too_many_stages_says_how_many_are_possible_and_why() -> None:
    profile = chain([1.0] * 6, forbidden={1: "x is changed in place", 2: "x is changed in place", 4: "no tensor"})
    with pytest.raises(UsageError) as caught:
        best(profile, *[Device()] * 4)
    assert str(caught.value) == (
        "4 stages: the model has 6 layers and can be cut into up to 3 stages; not elsewhere, because x is changed in "
        "place (2 places), no tensor (1 place). Use fewer stages"
    )
    for equal in (equal_layers, equal_parameters):
        with pytest.raises(UsageError, match="up to 3 stages"):
            equal(profile, 4)


def test_too_little_memory_says_where_how_much_and_what_to_do() -> None:
    nodes = [node(f"n{i}", weight_bytes=2 * 10**6, gradient_bytes=10**6, internal_bytes=10**6) for i in range(4)]
    profile = chain([1.0] * 4, nodes=nodes, base=5 * 10**6)
    with pytest.raises(UsageError) as caught:
        find(profile, [Device(memory=26 * 10**6), Device(memory=10 * 10**6)], "gpipe", 4, None, False)
    assert str(caught.value) == (
        "no cut into 2 stages fits the memory: stage 1 has 10.0 MB and needs at best 12.0 MB, 2.00 MB more than it has "
        "(base 5.00 MB, weights 2.00 MB, gradients 1.00 MB, activations 4.00 MB). What may help: --recompute, which "
        "would be enough; --schedule 1f1b, which would be enough; smaller micro-batches (more --microbatches, or a "
        "lower --batch-size); more stages; more memory"
    )
    with pytest.raises(UsageError, match="--recompute, which alone is not enough; smaller micro-batches"):
        find(profile, [Device(memory=10 * 10**6), Device(memory=10 * 10**6)], "1f1b", 4, None, False)


def test_a_process_that_does_not_fit_even_without_layers_is_told_apart() -> None:
    profile = chain([1.0] * 4, base=5 * 10**6)
    with pytest.raises(UsageError, match=r"stage 0 has 4\.00 MB .* without any layer, needs more than it has: give it"):
        best(profile, Device(memory=4 * 10**6), Device())


def test_a_given_cut_is_checked() -> None:
    nodes = [node(f"n{i}", weight_bytes=100) for i in range(4)]
    profile = chain([1.0] * 4, nodes=nodes, forbidden={2: "x is changed in place"})
    devices = [Device(), Device(memory=250)]

    def given(*positions: int) -> StagePlan:
        return plan_at(profile, positions, devices, "1f1b", 4, None, False, "given")

    check_fits(given(3), devices)
    with pytest.raises(UsageError, match=r"^this cut into 2 stages does not fit the memory: stage 1 .* another cut"):
        check_fits(given(1), devices)
    with pytest.raises(UsageError, match=r"^the model cannot be cut between n1 and n2: x is .* after n0 or after n2$"):
        given(2)
    with pytest.raises(UsageError, match=r"^2 cuts make 3 stages instead of 2: give 1"):
        given(1, 3)
    with pytest.raises(UsageError, match="would leave a stage without layers"):
        given(4)
