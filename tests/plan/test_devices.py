"""Devices of one's own: what is missing or wrong is said with the file, the field, what it is and a remedy."""

import pytest

from longstrand.errors import UserError
from longstrand.plan.devices import devices, find_device

NUMBERS = {
    "memory_gib": "95.0",
    "bfloat16_tflops": "989.0",
    "float32_tflops": "67.0",
    "memory_gb_per_second": "4000.0",
    "host_gb_per_second": "400.0",
    "peer_gb_per_second": "450.0",
    "network_gb_per_second": "50.0",
    "devices_per_host": "4",
}


def _refused(path, **changes):
    lines = [f"{name} = {value}" for name, value in (NUMBERS | changes).items() if value is not None]
    path.write_text("\n".join(lines))
    with pytest.raises(UserError) as raised:
        find_device(str(path))
    said = str(raised.value)
    assert said.startswith(f"{path}: ") and "{" not in said and "\n" not in said
    return said.removeprefix(f"{path}: ")


def test_a_file_with_all_numbers_is_a_device(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("\n".join(f"{name} = {value}" for name, value in NUMBERS.items()))
    found = find_device(str(path))
    assert (found.name, found.kind, found.memory_gib, found.devices_per_host) == ("mine", "gpu", 95.0, 4)


@pytest.mark.parametrize("field", [name for name in NUMBERS if name != "devices_per_host"])
def test_a_missing_number_is_named_with_what_it_is_and_an_example(field, tmp_path):
    said = _refused(tmp_path / "mine.toml", **{field: None})
    assert said.startswith(f"{field}: missing; it is ")
    assert f"add it, for example {field} = " in said
    assert "GiB" in said or "per second" in said


@pytest.mark.parametrize(
    "name", ["nan", "inf", "-inf", "1e308", "1e-308", "0", "-1.0", "'much'", "true", "[1.0]"]
)
def test_a_rate_that_is_none_is_refused(name, tmp_path):
    said = _refused(tmp_path / "mine.toml", bfloat16_tflops=name)
    assert said.startswith("bfloat16_tflops = ")
    assert "must be " in said
    assert "it is matrix products in bfloat16, 10^12 operations per second; for example" in said


def test_other_faults_are_said_in_one_line_each(tmp_path):
    path = tmp_path / "mine.toml"
    assert _refused(path, memory_gbi="1.0") == "memory_gbi: unknown; did you mean memory_gib?"
    assert _refused(path, colour="1.0").startswith("colour: unknown; the known ones: name, kind, memory_gib")
    assert _refused(path, kind="'tpu'").startswith("kind = 'tpu': must be 'gpu' or 'cpu'; it is ")
    assert _refused(path, devices_per_host="0").startswith("devices_per_host = 0: must be at least 1; ")
    assert "whole number" in _refused(path, devices_per_host="2.5")
    assert "must be below 1,073,741,824" in _refused(path, memory_gib="2e9")
    assert _refused(path, memory_gib="0.0").startswith("memory_gib = 0: must be greater than 0 on a device")
    assert _refused(path, memory_gib=str(2**70)).startswith(f"memory_gib = {2**70}: must be below 2**63")
    path.write_text("memory_gib = ")
    with pytest.raises(UserError, match="not valid TOML"):
        find_device(str(path))


def test_ranks_of_a_host_are_those_of_its_devices_or_of_this_machine():
    known = devices()
    assert [known["H200"].ranks_of_a_host(n) for n in (1, 8, 64)] == [1, 8, 8]
    assert [known["CPU"].ranks_of_a_host(n) for n in (1, 8, 64)] == [1, 8, 64]
    other = known["CPU"].model_copy(update={"memory_gib": 64.0, "devices_per_host": 2})
    assert [other.ranks_of_a_host(n) for n in (1, 8)] == [1, 2]
