"""llama.cpp's native libraries: where they lie, which of them fit this machine, and how they are built.

The Python layer (llama-cpp-python without libraries) installs once; each native build is a folder of its own,
a *flavour*, chosen at start. Everything here needs the standard library only, because `make run` uses it
before anything is installed. Knows nothing of models, devices or engines.
"""

from __future__ import annotations

# One place for the version: struct layouts move with every release of llama.cpp, so the Python layer and the
# libraries must come from the same sdist. pyproject.toml repeats it (a test compares them).
LLAMA_CPP_PYTHON = "0.3.36"
SDIST_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
