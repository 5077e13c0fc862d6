"""The levers that a plan chooses: it fits with them, not without any of them, and not with a weaker one."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import REAL, SLICE, TOY, small_room, toy_job, with_memory

from longstrand.architecture import DSA, KDA
from longstrand.plan.devices import GIB, find_device
from longstrand.plan.job import Job
from longstrand.plan.room import PROCESS_BYTES, Room, memory_of, missing, needed
from longstrand.plan.search import Plan, as_it_stands, levers_for, search, seconds_of, without_levers
from longstrand.plan.seconds import plan_seconds


def every_lever_is_needed(plan: Plan) -> bool:
    """Off, or on fewer ranks, it does not fit; with anything else that is weaker it does not, or is no faster."""
    levers = levers_for(without_levers(plan.job, plan.room), plan.room)
    for lever in levers:
        for value in lever.values[: lever.values.index(lever.of(plan.job))]:
            weaker = lever.put(plan.job, value)
            if not missing(weaker, plan.room):
                off = value == lever.values[0] or lever.setting.startswith("parallel")
                if off or seconds_of(weaker, plan.room).total < plan.seconds.total:
                    return False
    return True


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


def fastest_of_all(plan: Plan) -> float:
    """Seconds of every combination of levers on these ranks that fits and has no lever too many: none left out."""
    base, room = without_levers(plan.job, plan.room), plan.room
    off = {"tile": base.memory.tile, "keep_every": 1, "offload": "none", "optimizer": "device"}
    each_k = range(1, plan.job.shape.num_hidden_layers + 1)
    choices = product(
        {base.memory.tile, plan.job.memory.tile}, each_k, ("none", "host", "disk"), ("device", "host")
    )
    fitting = []
    for values in choices:
        chosen = dict(zip(off, values, strict=True))
        on = [name for name, value in chosen.items() if value != off[name]]
        tried = [chosen, *({**chosen, name: off[name]} for name in on)]
        judged = [bool(missing(with_memory(plan.job, **each), room)) for each in tried]
        if not judged[0] and all(judged[1:]):
            fitting.append(plan_seconds(with_memory(plan.job, **chosen), room.device).total)
    return min(fitting)


@pytest.mark.parametrize("groups", [("all",), ("kda", "mla"), ("head",)], ids=str)
@pytest.mark.parametrize("host_bytes", [None, 2**30, 7 * 2**30])
@pytest.mark.parametrize("part", [0.9, 0.6, 0.4, 0.3, 0.25])
def test_no_other_combination_that_fits_is_faster(part, host_bytes, groups):
    """Twelve layers of the toy, of which every third attends to all."""
    kinds = tuple((DSA if layer % 3 == 2 else KDA) for layer in range(12))
    deep = {"num_hidden_layers": 12, "layer_types": kinds, "mlp_layer_types": ("sparse",) * 12}
    shape = replace(TOY, **deep, indexer_types=("full",) * 12)
    job = Job(shape, 2**20, trainable=groups, kind="gpu")
    whole = memory_of(without_levers(job, small_room(GIB))).device_bytes
    plan = search(job, small_room(part * whole, host_bytes=host_bytes))
    if plan.fits:
        assert plan.seconds.total == pytest.approx(fastest_of_all(plan), rel=1e-9)
    assert plan.fits or part < 0.9 or host_bytes == 2**30


@pytest.mark.parametrize("disk_bytes", [0, 2 * 2**30])
@pytest.mark.parametrize("host_gib", [1, 3, 5, 7, 9])
@pytest.mark.parametrize("part", [0.7, 0.5, 0.35, 0.25])
def test_where_any_combination_fits_a_plan_is_found(part, host_gib, disk_bytes):
    """What one lever puts on a host leaves no room there for another, so that their order must not decide."""
    shape = replace(TOY, hidden_size=512, moe_intermediate_size=2048)
    job = Job(shape, 2**18, kind="gpu")
    whole = memory_of(without_levers(job, small_room(GIB))).device_bytes
    room = replace(small_room(part * whole, host_bytes=host_gib * 2**30), file_bytes=disk_bytes)
    base = without_levers(job, room)
    tile, keep_every, *_ = levers_for(base, room)
    choices = product(tile.values, keep_every.values, ("none", "host", "disk"), ("device", "host"))
    names = ("tile", "keep_every", "offload", "optimizer")
    some_fit = any(
        not missing(with_memory(base, **dict(zip(names, values, strict=True))), room) for values in choices
    )
    assert search(job, room).fits or not some_fit


def test_a_disk_that_no_lever_needs_is_not_missed():
    """24 B200 hold 4M tokens with the optimizer on hosts of 2 TiB, whatever their disks: found with and without."""
    for disk_bytes in (0, None):
        room = Room(find_device("B200"), 24, host_bytes=2048 * GIB, file_bytes=disk_bytes)
        assert search(Job(REAL, 2**22, kind="gpu"), room).fits


def test_layer_inputs_on_the_host_are_cheaper_than_computing_them_again():
    """Copies of 90 GiB per rank at tens of GB/s are hidden in minutes of work; 23 layers again are not."""
    job = Job(REAL, 2**19, trainable=("kda", "mla"), kind="gpu")
    plan = search(job, Room(find_device("H200"), 8, host_bytes=2048 * GIB))
    assert [(step.setting, step.value) for step in plan.steps] == [("memory.offload", "host")]
    assert plan.steps[0].seconds == 0
    without_host = search(job, Room(find_device("H200"), 8, host_bytes=25 * GIB, file_bytes=0))
    kept = without_host.job.memory.keep_every
    assert without_host.fits and kept > 1
    faster = [
        k
        for k in range(2, 45)
        if seconds_of(with_memory(without_host.job, keep_every=k), plan.room).total
        < without_host.seconds.total
    ]
    assert faster and all(
        missing(with_memory(without_host.job, keep_every=k), without_host.room) for k in faster
    )


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
