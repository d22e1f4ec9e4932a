from __future__ import annotations

from pathlib import Path

from edgerun.native.cpu_flags import instruction_flags, read_instruction_flags

X86 = "processor : 0\nflags\t\t: fpu sse4_2 avx2 avx512f amx_int8 constant_tsc ibrs_enhanced nopl\n"
ARM = "processor : 0\nFeatures\t: fp asimd asimddp i8mm\n"


def test_x86_keeps_instruction_sets_that_a_build_uses_and_drops_kernel_flags() -> None:
    assert instruction_flags(X86) == {"sse4_2", "avx2", "avx512f"}


def test_arm_features_all_count() -> None:
    assert instruction_flags(ARM) == {"fp", "asimd", "asimddp", "i8mm"}


def test_cores_that_differ_leave_what_all_of_them_have() -> None:
    assert instruction_flags(ARM + "processor : 1\nFeatures : fp asimd\n") == {"fp", "asimd"}


def test_cpu_without_flags_or_without_cpuinfo_has_none(tmp_path: Path) -> None:
    assert instruction_flags("processor : 0\nisa : rv64imafdc\n") == frozenset()
    assert read_instruction_flags(tmp_path / "absent") == frozenset()
