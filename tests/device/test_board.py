from __future__ import annotations

from pathlib import Path

import pytest

from edgerun.device import board
from edgerun.device.files import SystemFiles
from tests.device.trees import FIXTURES, make_tree


def test_single_board_computer_is_named_by_its_device_tree() -> None:
    files = SystemFiles(FIXTURES / "rpi5-8gb")

    assert board.read_board(files) == "Raspberry Pi 5 Model B Rev 1.0"
    assert board.read_soc(board.read_compatible(files)) == "bcm2712"


@pytest.mark.parametrize(
    ("name", "expected"), [("ThinkPad X1\n", "ThinkPad X1"), ("To Be Filled By O.E.M.\n", None), ("", None)]
)
def test_pc_is_named_by_its_firmware(name: str, expected: str | None, tmp_path: Path) -> None:
    files = make_tree(tmp_path, {"sys/class/dmi/id/product_name": name})

    assert board.read_board(files) == expected
    assert board.read_soc(board.read_compatible(files)) is None


def test_device_tree_is_found_at_its_other_path(tmp_path: Path) -> None:
    base = "sys/firmware/devicetree/base"
    files = make_tree(tmp_path, {f"{base}/compatible": b"vendor,x\0vendor,soc1\0", f"{base}/model": b"X\0"})

    assert board.read_board(files) == "X"
    assert board.read_soc(board.read_compatible(files)) == "soc1"


def test_wsl_and_containers_are_told_apart() -> None:
    wsl, container = (
        SystemFiles(FIXTURES / "wsl2-rtx3060"),
        SystemFiles(FIXTURES / "orin-nx-16gb-in-container"),
    )

    assert (board.is_wsl(wsl), board.is_container(wsl)) == (True, False)
    assert (board.is_wsl(container), board.is_container(container)) == (False, True)
