"""Prints what ptxas says of every kernel, as a Markdown table; fails where a kernel spills.

usage: ptxas_table.py [NVCC]
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ARCHITECTURES = (80, 86, 89, 90, 100, 120)
_ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\S+)' for 'sm_\d+\w*'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)
_WORDS = {"5uint4": 16, "5uint2": 8, "j": 4, "t": 2, "h": 1}
_TYPES = {
    "f": "float32",
    "6__half": "float16",
    "13__nv_bfloat16": "bfloat16",
    "13__nv_fp8_e4m3": "float8",
}
_TYPE = "|".join(_TYPES)


def describe(mangled: str) -> str:
    """`gather, 16-byte words` or `float16 to float8` out of a kernel's mangled name."""
    if found := re.search(r"rows_kernelILNS\w*?9DirectionE(\d)E(5uint4|5uint2|[jth])", mangled):
        way = ("gather", "scatter")[int(found[1])]
        return f"{way}, {_WORDS[found[2]]}-byte words"
    if found := re.search(rf"convert_kernelI({_TYPE})({_TYPE}|S\w*_)E", mangled):
        source = _TYPES[found[1]]
        # A type that stands there for the second time is mangled as a reference to the first.
        return f"{source} to {_TYPES.get(found[2], source)}"
    return mangled


def main(nvcc: str = "nvcc") -> int:
    registers: dict[str, dict[int, int]] = defaultdict(dict)
    worst = 0
    for source in sorted((ROOT / "csrc/cuda").glob("*.cu")):
        for sm in ARCHITECTURES:
            command = [nvcc, "-std=c++20", "-O3", f"-arch=sm_{sm}", "-cubin", "-Xptxas", "-v"]
            command += ["-I", str(ROOT / "csrc"), str(source), "-o", "/dev/null"]
            said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
            for entry in _ENTRY.finditer(said):
                registers[describe(entry["name"])][sm] = int(entry["registers"])
                worst = max(worst, *(int(entry[key]) for key in ("stack", "stores", "loads")))
    print("| kernel | " + " | ".join(f"sm_{sm}" for sm in ARCHITECTURES) + " |")
    print("|---" * (len(ARCHITECTURES) + 1) + "|")
    for name in sorted(registers, key=lambda name: (name.split(",")[0], len(name), name)):
        cells = (str(registers[name].get(sm, "")) for sm in ARCHITECTURES)
        print(f"| {name} | " + " | ".join(cells) + " |")
    print(f"\nLargest stack frame or spill of any kernel: {worst} bytes.")
    return 1 if worst else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
