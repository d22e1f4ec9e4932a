from __future__ import annotations

from pathlib import Path

import pytest

from edgerun.device.files import SystemFiles
from edgerun.device.probe import probe
from edgerun.device.telemetry import DeviceLoad, LoadReader, read_load
from tests.device.trees import BOARDS, FIXTURES, copy_board, make_tree

SMI = "_cmd/nvidia-smi--query-gpu=utilization.gpu,temperature.gpu,power.draw--format=csv,noheader,nounits"


def reader_of(root: Path) -> LoadReader:
    return LoadReader(probe(root), SystemFiles(root))


@pytest.mark.parametrize("board", BOARDS)
def test_every_board_can_be_read(board: str) -> None:
    load = reader_of(FIXTURES / board).read()

    assert load.memory_available_bytes is not None
    assert (load.gpu_percent is not None) == (board not in ("laptop-cpu", "rpi5-8gb"))


@pytest.mark.parametrize(
    ("board", "path"),
    [
        ("orin-nano-8gb-jp511", "sys/devices/gpu.0/load"),
        ("orin-nano-8gb-jp62", "sys/devices/platform/gpu.0/load"),
        ("agx-xavier-jp511", "sys/devices/gpu.0/load"),
    ],
)
def test_gpu_load_is_per_mille(board: str, path: str, tmp_path: Path) -> None:
    root = copy_board(board, tmp_path)
    reader = reader_of(root)
    make_tree(root, {path: "437\n"})

    assert reader.read().gpu_percent == 43.7


def test_gpu_load_node_may_appear_late(tmp_path: Path) -> None:
    root = copy_board("orin-nano-8gb-jp721", tmp_path)
    nodes = list(root.glob("sys/**/load"))
    for node in nodes:
        node.unlink()
    reader = reader_of(root)

    assert reader.read().gpu_percent is None
    make_tree(root, {"sys/class/devfreq/17000000.gpu/device/load": "1000"})
    assert reader.read().gpu_percent == 100.0


def test_gpu_load_beyond_its_range_is_bounded(tmp_path: Path) -> None:
    root = copy_board("orin-nano-8gb-jp62", tmp_path)
    make_tree(root, {"sys/devices/platform/gpu.0/load": "1040"})

    assert reader_of(root).read().gpu_percent == 100.0


def test_thor_and_cards_are_read_through_nvidia_smi() -> None:
    assert reader_of(FIXTURES / "agx-thor-jp72").read().gpu_percent == 0.0
    assert reader_of(FIXTURES / "desktop-rtx4090").read().gpu_percent == 2.0


def test_cards_give_temperature_and_power(tmp_path: Path) -> None:
    root = copy_board("desktop-rtx4090", tmp_path)
    make_tree(root, {SMI: "17, 61, 201.5\n[N/A], [N/A], [N/A]\n"})
    load = reader_of(root).read()

    assert (load.gpu_percent, load.temperature_c, load.power_w) == (17.0, 61.0, 201.5)


def test_nvidia_smi_is_not_asked_for_every_reading(tmp_path: Path) -> None:
    root = copy_board("desktop-rtx4090", tmp_path)
    make_tree(root, {SMI: "10, 50, 100\n"})
    now = [0.0]
    reader = LoadReader(probe(root), SystemFiles(root), clock=lambda: now[0])
    reader.read()
    make_tree(root, {SMI: "90, 50, 100\n"})

    now[0] = 0.5
    assert reader.read().gpu_percent == 10.0
    now[0] = 1.0
    assert reader.read().gpu_percent == 90.0


def test_recorded_tegrastats_gives_temperature_and_input_power() -> None:
    load = reader_of(FIXTURES / "orin-nano-8gb-jp62").read()

    assert (load.temperature_c, load.power_w) == (48.5, 4.838)


def test_off_rail_temperature_is_left_out(tmp_path: Path) -> None:
    files = make_tree(
        tmp_path,
        {
            "sys/class/thermal/thermal_zone0/temp": "-256000\n",
            "sys/class/thermal/thermal_zone1/temp": "41500\n",
            "sys/class/thermal/thermal_zone2/temp": "rubbish",
            "sys/class/hwmon/hwmon0/name": "k10temp\n",
            "sys/class/hwmon/hwmon0/temp1_input": "52000\n",
            "sys/class/hwmon/hwmon1/name": "nvme\n",
            "sys/class/hwmon/hwmon1/temp1_input": "70000\n",
        },
    )

    assert LoadReader(probe(tmp_path), files).read().temperature_c == 52.0


@pytest.mark.parametrize(
    ("labels", "expected"), [(("VDD_IN", "VDD_SOC"), 5.0), (("VDD_GPU_SOC", "VDD_CPU_CV"), 6.0)]
)
def test_board_power_is_its_input_or_the_sum_of_its_rails(
    labels: tuple[str, str], expected: float, tmp_path: Path
) -> None:
    folder = "sys/class/hwmon/hwmon3"
    files = make_tree(
        tmp_path,
        {
            f"{folder}/name": "ina3221\n",
            f"{folder}/in1_label": labels[0],
            f"{folder}/in1_input": "5000",
            f"{folder}/curr1_input": "1000",
            f"{folder}/in2_label": labels[1],
            f"{folder}/in2_input": "5000",
            f"{folder}/curr2_input": "200",
        },
    )

    assert LoadReader(probe(tmp_path), files).read().power_w == expected


def test_cpu_load_is_the_mean_since_the_last_reading(tmp_path: Path) -> None:
    files = make_tree(tmp_path, {"proc/stat": "cpu  100 0 100 800 0 0 0 0 0 0\ncpu0 1 1 1 1\n"})
    reader = LoadReader(probe(tmp_path), files)

    assert reader.read().cpu_percent is None
    make_tree(tmp_path, {"proc/stat": "cpu  150 0 110 900 40 0 0 0 0 0\n"})
    assert reader.read().cpu_percent == 30.0  # 60 busy of 200 ticks; waiting for the disk is idle
    assert reader.read().cpu_percent is None  # no tick has passed


def test_nothing_readable_is_none_everywhere(tmp_path: Path) -> None:
    assert reader_of(tmp_path).read() == DeviceLoad(None, None, None, None, None)


def test_this_machine_can_be_read() -> None:
    load = read_load(probe(smoke=False))

    assert load.memory_available_bytes
    assert load.cpu_percent is None or 0 <= load.cpu_percent <= 100
    assert set(load.to_json()) == {
        *("cpu_percent", "gpu_percent", "temperature_c", "power_w", "memory_available_bytes"),
    }
