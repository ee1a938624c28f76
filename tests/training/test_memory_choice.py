"""Which memory savings are taken: the cheapest that fits, as far as device and host have room."""

from __future__ import annotations

import pytest

from flashtrain.errors import UserError
from flashtrain.models.activation_checkpointing import MemorySavings
from flashtrain.training.memory import GIB, MemoryEstimate
from flashtrain.training.memory_choice import Room, candidates, choose_option, memory_options

A_SAMPLE = {"none": 16, "selective": 8, "full": 4}  # GiB
LAYERS = 8


def estimate(micro_batch: int, savings: MemorySavings) -> MemoryEstimate:
    some = (savings.layers or 0) / LAYERS  # of a model whose other layers store all
    kinds = A_SAMPLE["none"], A_SAMPLE[savings.checkpointing]
    size = (
        (kinds[0] * (1 - some) + kinds[1] * some if some else kinds[1])
        * (0.5 if savings.ffn_chunk else 1)
        * (0.5 if savings.offload else 1)
    )
    host = 6 * micro_batch * GIB if savings.offload else 0
    return MemoryEstimate(0, 0, 0, int(size * micro_batch * GIB), 0, 0, host=host)


def chosen(room: Room, micro_batch: int | None = 1, **asked) -> tuple[MemorySavings, int]:
    sizes = [1, 2, 4, 8] if micro_batch is None else [micro_batch]
    option = choose_option(memory_options(candidates(**asked), sizes, room, estimate), room)
    return option.savings, option.micro_batch


def test_auto_tries_the_cheapest_in_time_first():
    kinds = [(s.checkpointing, bool(s.ffn_chunk and s.loss_chunk), s.offload) for s in candidates()]
    assert kinds == [
        ("none", False, False),
        ("selective", False, False),
        ("full", False, False),
        ("full", True, False),
        ("full", True, True),
    ]


@pytest.mark.parametrize(
    ("free", "expected"),
    [
        (20, MemorySavings()),
        (10, MemorySavings("selective")),
        (5, MemorySavings("full")),
        (2.5, MemorySavings("full", False, 16384, 2048)),
        (1.2, MemorySavings("full", True, 16384, 2048)),
    ],
)
def test_auto_takes_the_first_that_fits(free, expected):
    assert chosen(Room(int(free * GIB)))[0] == expected


@pytest.mark.parametrize(
    ("free", "layers"), [(20, None), (16.7, 1), (12, 6), (9.2, None), (5, None)]
)
def test_auto_recomputes_as_few_layers_as_fit_where_storing_all_does_not(free, layers):
    room = Room(int(free * GIB))
    option = choose_option(memory_options(candidates(), [1, 2], room, estimate, LAYERS), room)
    assert option.fits
    assert option.micro_batch == 1
    assert option.savings.layers == layers
    kind = {20: "none", 5: "full"}.get(free, "selective")
    assert option.savings.checkpointing == kind
    assert len(memory_options(candidates("selective"), [1], room, estimate, LAYERS)) == 1


def test_numbers_that_are_given_stay_whatever_auto_takes():
    assert all(s.ffn_chunk == 100 for s in candidates(ffn_chunk=100))
    assert candidates(loss_chunk=50)[-1] == MemorySavings("full", True, 16384, 50)
    assert candidates(offload=True) == [MemorySavings("full", True, 16384, 2048)]


def test_the_micro_batch_is_the_largest_that_fits_with_the_first_kind_that_fits_at_all():
    assert chosen(Room(40 * GIB), micro_batch=None) == (MemorySavings(), 2)
    assert chosen(Room(10 * GIB), micro_batch=None) == (MemorySavings("selective"), 1)


def test_where_nothing_fits_the_last_that_the_host_has_room_for_is_tried():
    assert chosen(Room(GIB // 2, 100 * GIB))[0].offload
    assert chosen(Room(GIB // 2, 5 * GIB))[0] == MemorySavings("full", False, 16384, 2048)


def test_offloading_without_room_in_the_host_is_one_line():
    with pytest.raises(UserError, match=r"memory.offload=true .* 6\.0 GiB .* 5\.0") as error:
        chosen(Room(GIB, 5 * GIB), checkpointing="full", offload=True)
    assert "\n" not in str(error.value)


def test_an_option_reads_as_the_settings_that_ask_for_it():
    room = Room(10 * GIB, 100 * GIB)
    first, some, *_, last = memory_options(candidates(), [1], room, estimate, LAYERS)
    assert some.line().startswith(
        "memory.activation_checkpointing=auto (selective in 7 of the layers)  "
    )
    assert (
        " ".join(first.line().split())
        == "memory.activation_checkpointing=none 16.0 GiB, micro-batch 1 - does not fit"
    )
    assert " ".join(last.line().split()) == (
        "memory.activation_checkpointing=full memory.offload=true memory.ffn_chunk=16384 "
        "memory.loss_chunk=2048 1.0 GiB, micro-batch 1, 6.0 GiB in host memory"
    )
