"""An engine process whose steps do not end while a file exists; test_client.py starts it in place of the real
one. Everything but the step is the real engine.

    python stuck_engine.py FILE --fd=N --log-level=L
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from edgerun.engine import main
from edgerun.llm.loop import EngineLoop, Stepper


class StuckWhile:
    def __init__(self, stepper: Stepper, file: Path) -> None:
        self._stepper, self._file = stepper, file

    @property
    def has_work(self) -> bool:
        return self._stepper.has_work

    def step(self) -> None:
        while self._file.exists():
            time.sleep(0.01)
        self._stepper.step()

    def idle(self) -> None:
        self._stepper.idle()


class StuckLoop(EngineLoop):
    file: Path

    def add(self, stepper: Stepper) -> None:
        super().add(StuckWhile(stepper, self.file))


if __name__ == "__main__":
    StuckLoop.file = Path(sys.argv.pop(1))
    main.EngineLoop = StuckLoop  # type: ignore[misc]
    main.main()
