"""Devices and links as data, profiles, quantities on a command line."""

from dataclasses import replace
from pathlib import Path

import pytest

from headrace.cost import hardware, parse
from headrace.errors import ConfigError


def test_every_device_is_complete_and_its_links_exist() -> None:
    table, links = hardware.devices(), hardware.links()
    assert {"h100", "h200", "b200", "a100", "l40s", "mi300x"} <= set(table)
    assert {device.kind for device in table.values()} == {"gpu", "cpu", "apple", "phone"}
    for device in table.values():
        assert device.source
        assert {device.link, device.host_link} <= set(links)
        assert 0 < device.bandwidth_share <= 1
        assert 0 < device.compute_share <= 1
        assert device.rate("f32") <= device.rate("bf16") <= device.rate("fp8")
    assert all(link.source and link.latency > 0 for link in links.values())


def test_own_devices_add_to_the_table(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        '[mine]\ntitle = "t"\nkind = "cpu"\nmemory = 1e9\nbandwidth = 1e9\n'
        'rates = { f32 = 1e9 }\nsource = "s"\n'
    )
    mine = hardware.find_device("mine", file)
    assert mine.rate("int8") == 1e9
    file.write_text(file.read_text() + "speed = 3\n")
    with pytest.raises(ConfigError, match="mine: unknown field speed"):
        hardware.find_device("mine", file)
    with pytest.raises(ConfigError, match=r"unknown device 'h1000'.*h100"):
        hardware.find_device("h1000")
    with pytest.raises(ConfigError, match="cannot read"):
        hardware.find_device("h100", tmp_path / "absent.toml")


def test_four_bit_weights_compute_in_sixteen_where_hardware_has_no_four() -> None:
    h100, b200 = hardware.find_device("h100"), hardware.find_device("b200")
    assert h100.rate("fp4") == h100.rate("bf16")
    assert b200.rate("fp4") == 4 * b200.rate("bf16")


def test_profile_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "profile.json"
    with pytest.raises(ConfigError, match="headrace calibrate"):
        hardware.load_profile(path)
    device = replace(hardware.find_device("epyc-9654"), name="local", measured={"read": {"1": 2.0}})
    hardware.save_profile(device, path)
    assert hardware.load_profile(path) == device
    path.write_text("{")
    with pytest.raises(ConfigError, match="again"):
        hardware.load_profile(path)


@pytest.mark.parametrize(
    ("text", "value"), [("50ms", 0.05), ("2s", 2), ("1.5", 1.5), ("3m", 180), ("10us", 1e-5)]
)
def test_seconds(text: str, value: float) -> None:
    assert parse.seconds("slo", text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "value"), [("8GiB", 8 << 30), ("512M", 512 << 20), ("16GB", 16 * 10**9), ("7", 7)]
)
def test_sizes(text: str, value: int) -> None:
    assert parse.size("memory", text) == value


def test_pairs() -> None:
    assert parse.promise("ttft=500ms,tpot=50ms") == parse.Promise(0.5, 0.05)
    assert parse.promise("") == parse.Promise()
    traffic = parse.traffic("rate=20,prompt=1000,output=200,cached=0.25")
    assert (traffic.rate, traffic.computed, traffic.context) == (20, 750, 1100)
    for call, text, word in (
        (parse.promise, "ttft=fast", "slo"),
        (parse.promise, "itl=1s", "itl"),
        (parse.traffic, "rate=-1", "rate"),
        (parse.traffic, "rate=x", "not a number"),
    ):
        with pytest.raises(ConfigError, match=word):
            call(text)
    with pytest.raises(ConfigError, match="memory"):
        parse.size("memory", "8 parsecs")
