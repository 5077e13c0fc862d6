"""The questions turned around: each answer is the last that fits."""

from dataclasses import replace
from itertools import cycle

import pytest
from planned import REAL, SLICE, TOY, small_room, toy_job, with_memory

from longstrand.errors import UserError
from longstrand.plan.devices import GIB, find_device
from longstrand.plan.inverse import doubling_lengths, fewest_devices, longest_sequence, sweep
from longstrand.plan.job import Job
from longstrand.plan.room import Room
from longstrand.plan.search import search


@pytest.mark.parametrize(
    ("job", "room"),
    [
        (toy_job(), small_room(GIB / 4, host_bytes=GIB * 4, file_bytes=2 * GIB)),
        (toy_job(), Room(find_device("CPU"), 1, host_bytes=2 * GIB, file_bytes=20 * GIB)),
        (Job(SLICE, 2**20), Room(find_device("H200"), 1, host_bytes=1000 * GIB, file_bytes=0)),
        (Job(SLICE, 2**20, kind="gpu"), Room(find_device("H200"), 1, host_bytes=256 * GIB, file_bytes=0)),
    ],
)
def test_the_longest_sequence_fits_and_a_thousand_tokens_more_do_not(job, room):
    found = longest_sequence(job, room)
    assert found is not None and found.plan.fits
    length = found.plan.job.length
    assert length % 1024 == 0
    assert found.next_plan is not None and not found.next_plan.fits
    assert found.next_plan.job.length == length + 1024
    assert not search(replace(job, length=2 * length), room).fits


@pytest.mark.parametrize("devices", [1, 8, 64])
@pytest.mark.parametrize("device", ["H100-80", "H200", "B200"])
@pytest.mark.parametrize("shape", [SLICE, TOY, REAL], ids=["slice", "toy", "real"])
def test_the_longest_is_the_last_that_a_search_says_fits(shape, device, devices):
    for host_bytes in (None, 600 * GIB):
        job, room = Job(shape, 1024, kind="gpu"), Room(find_device(device), devices, host_bytes=host_bytes)
        found = longest_sequence(job, room)
        if found is None:
            assert not search(job, room).fits
            continue
        length = found.plan.job.length
        assert found.plan.fits and found.plan == search(replace(job, length=length), room)
        assert not any(search(replace(job, length=length + 1024 * k), room).fits for k in (1, 2, 5, 17, 129))


def test_levers_that_alternate_for_ever_end_the_search_all_the_same(monkeypatch):
    job, room = toy_job(), small_room(GIB / 4, host_bytes=4 * GIB)
    wanted = longest_sequence(job, room)
    tiles = cycle((256, 512))
    monkeypatch.setattr(
        "longstrand.plan.inverse._roomiest", lambda job, room: with_memory(job, tile=next(tiles))
    )
    assert wanted is not None and longest_sequence(job, room) == wanted


def test_another_tile_is_found_where_layer_inputs_must_leave_for_a_file():
    """With them on a host of 600 GiB each tile is 20 MiB too large or more; in files the largest fits."""
    room = Room(find_device("H200"), 1, host_bytes=600 * GIB)
    plan = search(Job(SLICE, 6_620_160, kind="gpu"), room)
    assert plan.fits and plan.job.memory.offload == "disk"


def test_more_memory_is_never_a_shorter_sequence():
    rooms = [small_room(part * GIB, host_bytes=4 * GIB, file_bytes=8 * GIB) for part in (0.25, 0.5, 1.0)]
    lengths = [longest_sequence(toy_job(), room).plan.job.length for room in rooms]
    assert lengths == sorted(lengths)


def test_no_sequence_fits_where_the_weights_do_not():
    assert longest_sequence(Job(SLICE, 2**20), Room(find_device("RTX-4090"), 1)) is None


@pytest.mark.parametrize(
    ("job", "room"),
    [
        (Job(REAL, 2**20), Room(find_device("B200"), 1)),
        (Job(SLICE, 2**20), Room(find_device("H100-80"), 1, host_bytes=300 * GIB)),
    ],
)
def test_one_host_or_device_fewer_than_the_fewest_does_not_fit(job, room):
    found = fewest_devices(job, room).plan
    assert found.fits
    number, per_host = found.room.num_devices, room.device.devices_per_host
    fewer = number - (per_host if number > per_host else 1)
    assert number <= per_host or number % per_host == 0
    assert not fewer or not search(job, replace(room, num_devices=fewer)).fits


def test_no_number_of_devices_holds_what_a_single_one_must():
    found = fewest_devices(toy_job(4096), small_room(2**16))
    assert not found.plan.fits
    assert found.most_tried == 2048  # two tokens each
    closest, over = found.plan.room.num_devices, sum(found.plan.missing.values())
    for number in (8, 16, 256, 2048):
        other = search(toy_job(4096), replace(small_room(2**16), num_devices=number))
        assert number == closest or sum(other.missing.values()) >= over


def test_a_sweep_has_a_plan_per_doubling():
    lengths = doubling_lengths(16384, 2**22)
    assert lengths == [16384 * 2**n for n in range(9)]
    assert doubling_lengths(1024, 5000) == [1024, 2048, 4096, 5000]
    assert doubling_lengths(4096, 4096) == [4096]
    plans = sweep(toy_job(), small_room(8 * GIB), lengths)
    assert [plan.job.length for plan in plans] == lengths
    memory = [plan.memory.device_bytes for plan in plans if not plan.steps]
    assert memory == sorted(memory)


def test_a_sweep_ascends():
    with pytest.raises(UserError, match="must ascend"):
        doubling_lengths(4096, 1024)


def test_a_sweep_is_bounded():
    assert len(doubling_lengths(1024, 4 * 2**20)) == 13
    with pytest.raises(UserError, match="has 41 lengths, and at most 13 are planned, up to 4,096 times"):
        doubling_lengths(1, 2**40)
