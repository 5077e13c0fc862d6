"""The levers that a plan chooses: it fits with them, not without any of them, and not with a weaker one."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import REAL, SLICE, TOY, small_room, toy_job, with_memory

from longstrand.plan.devices import GIB, find_device
from longstrand.plan.job import Job
from longstrand.plan.room import PROCESS_BYTES, Room, memory_of, missing, needed
from longstrand.plan.search import Plan, as_it_stands, levers_for, search, without_levers


def every_lever_is_needed(plan: Plan) -> bool:
    """Each at its weakest value: off, or anything weaker, does not fit."""
    levers = levers_for(without_levers(plan.job, plan.room), plan.room)
    weaker = [
        lever.put(plan.job, value)
        for lever in levers
        for value in lever.values[: lever.values.index(lever.of(plan.job))]
    ]
    return all(missing(job, plan.room) for job in weaker)


ROOMS = {
    "the slice, one H200, 1M": (Job(SLICE, 2**20), Room(find_device("H200"), 1)),
    "the slice, one H200, 3M, 300 GiB of host": (
        Job(SLICE, 3 * 2**20),
        Room(find_device("H200"), 1, host_bytes=300 * GIB),
    ),
    "the slice, 8 H100, 4M": (Job(SLICE, 2**22), Room(find_device("H100-80"), 8)),
    "all of it, 64 B200, 1M": (Job(REAL, 2**20), Room(find_device("B200"), 64)),
    "all of it, 128 H100, 2M": (Job(REAL, 2**21), Room(find_device("H100-80"), 128)),
    "the toy, this CPU, 16M in 12 GiB": (toy_job(2**24), Room(find_device("CPU"), 1, host_bytes=12 * GIB)),
    "the toy, 2 processes, 8 sequences": (
        toy_job(2**21, sequences_per_step=8),
        Room(find_device("CPU"), 2, host_bytes=4 * GIB),
    ),
}


@pytest.mark.parametrize("case", ROOMS)
def test_a_plan_fits_and_without_any_of_its_levers_does_not(case):
    plan = search(*ROOMS[case])
    assert plan.fits and not missing(plan.job, plan.room)
    assert every_lever_is_needed(plan)


@settings(max_examples=20, deadline=None)
@given(part=st.floats(0.15, 1.1), power=st.integers(12, 22), devices=st.sampled_from([1, 2, 4]))
def test_so_it_is_on_devices_of_any_size(part, power, devices):
    job = toy_job(2**power)
    room = small_room(GIB, devices)
    whole = memory_of(without_levers(job, room)).device_bytes
    plan = search(job, small_room(part * whole, devices))
    assert (plan.job == without_levers(job, plan.room)) == (part >= 1) or not plan.fits
    if plan.fits:
        assert plan.memory.device_bytes <= plan.room.limit("device")
        assert every_lever_is_needed(plan)


def test_what_fits_needs_no_lever():
    plan = search(toy_job(4096), small_room(8 * GIB))
    assert plan.fits and plan.steps == ()


def test_levers_come_in_the_order_of_their_cost_and_say_what_was_over():
    plan = search(toy_job(2**22), small_room(0.2 * memory_of(toy_job(2**22)).device_bytes))
    order = ["memory.tile", "memory.keep_every", "memory.offload", "memory.optimizer", "parallel.context"]
    named = [step.setting for step in plan.steps]
    assert named == sorted(named, key=order.index) and named
    assert plan.steps[0].over == missing(without_levers(plan.job, plan.room), plan.room)
    assert all(sum(step.over.values()) > 0 for step in plan.steps)


def test_layer_inputs_go_to_the_host_before_they_go_to_a_file():
    job, tight = toy_job(2**22), 0.2 * memory_of(toy_job(2**22)).device_bytes
    on_host = search(job, small_room(tight))
    assert on_host.job.memory.offload == "host"
    host = needed(on_host.job, on_host.room, "host")
    in_file = search(job, small_room(tight, host_bytes=host // 4))
    assert in_file.job.memory.offload == "disk"
    assert in_file.fits


def test_a_cpu_is_never_asked_to_offload_to_itself():
    plan = search(*ROOMS["the toy, this CPU, 16M in 12 GiB"])
    assert plan.job.memory.offload == "disk" and plan.job.memory.optimizer == "device"


def test_processes_of_one_machine_share_its_memory():
    one, four = (Room(find_device("CPU"), n, host_bytes=8 * GIB) for n in (1, 4))
    assert one.limit("device") == 8 * GIB - PROCESS_BYTES["cpu"]
    assert four.limit("device") == 2 * GIB - PROCESS_BYTES["cpu"]


def test_a_free_disk_too_small_for_the_spool_is_no_plan():
    job, room = ROOMS["the toy, this CPU, 16M in 12 GiB"]
    plan = search(job, replace(room, file_bytes=10 * 2**20))
    assert plan.missing.get("file", 0) > 0 or plan.missing.get("device", 0) > 0


def test_what_does_not_fit_is_as_close_as_the_levers_bring_it():
    plan = search(toy_job(2**20), small_room(2**20))
    assert not plan.fits
    assert sum(plan.missing.values()) < sum(missing(without_levers(plan.job, plan.room), plan.room).values())


def test_sequences_are_spread_before_they_are_shared():
    many = search(toy_job(4096, sequences_per_step=4), small_room(8 * GIB, 4))
    alone = search(toy_job(4096), small_room(8 * GIB, 4))
    assert (many.job.parallel.data, many.job.parallel.context) == (4, 1)
    assert (alone.job.parallel.data, alone.job.parallel.context) == (1, 4)


def test_expert_ranks_divide_the_experts_and_the_ranks():
    for devices in (1, 2, 3, 6, 8):
        mesh = search(toy_job(4096), small_room(8 * GIB, devices)).job.parallel
        assert mesh.world == devices
        assert devices % mesh.expert == 0 and TOY.n_routed_experts % mesh.expert == 0


@pytest.mark.parametrize("where", ["device", "host"])
def test_the_optimizer_stays_where_it_was_put(where):
    plan = search(toy_job(4096), small_room(8 * GIB, optimizer=where))
    assert plan.job.memory.optimizer == where


def test_a_recipes_levers_are_planned_as_they_stand():
    job = with_memory(toy_job(65536), tile=512, keep_every=2, offload="host")
    plan = as_it_stands(job, small_room(8 * GIB))
    assert plan.job == job
    assert [(step.setting, step.value) for step in plan.steps] == [
        ("memory.keep_every", 2),
        ("memory.offload", "host"),
    ]
    assert all(step.over == {} for step in plan.steps)
