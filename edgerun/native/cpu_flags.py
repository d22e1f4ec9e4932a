"""What instructions this CPU has, in the words of /proc/cpuinfo.

A build with GGML_NATIVE uses every instruction of the CPU that compiled it and dies with SIGILL on a CPU that
lacks one, so a build remembers the flags it may have used.
"""

from __future__ import annotations

import re
from pathlib import Path

# cpuinfo mixes instruction sets with kernel and errata flags that come and go with kernel updates. Only those
# that `-march=native` can turn into instructions count. Not AMX: our builds leave it out (toolchain.amx_off).
_X86_INSTRUCTIONS = re.compile(
    r"(s?sse|pni$|avx|fma|f16c$|bmi|gfni|v?aes|v?pclmul|movbe|adx|sha|popcnt|abm|xop|rd(rand|seed)|"
    r"serialize|clwb|clflushopt|prfchw|3dnowprefetch|lahf_lm|fsgsbase|cx16)"
)


def instruction_flags(cpuinfo: str) -> frozenset[str]:
    """Instruction sets named in the text of /proc/cpuinfo; empty where the kernel does not tell.

    Big.LITTLE boards list cores that differ: only what all of them have counts.
    """
    per_core: list[frozenset[str]] = []
    # A server repeats the same line for each of its 200 threads.
    for line in set(cpuinfo.splitlines()):
        key, _, value = line.partition(":")
        if key.strip() == "flags":
            per_core.append(frozenset(flag for flag in value.split() if _X86_INSTRUCTIONS.match(flag)))
        elif key.strip() == "Features":  # Arm: every entry is an instruction set
            per_core.append(frozenset(value.split()))
    return frozenset.intersection(*per_core) if per_core else frozenset()


def read_instruction_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    try:
        return instruction_flags(cpuinfo.read_text(errors="replace"))
    except OSError:
        return frozenset()
