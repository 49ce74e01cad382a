"""Prints what a pytest run counted; fails when a test was skipped that may not be, or none ran.

usage: count_tests.py JUNIT_XML ALLOWED_SKIPS
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from pathlib import Path


def main(report: str, allow_list: str) -> int:
    allowed = [
        line.strip()
        for line in Path(allow_list).read_text().splitlines()
        if line.strip() and not line.startswith("#")
    ]
    passed = failed = skipped = 0
    unexpected = []
    for case in ET.parse(report).iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name')}"
        skip = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            failed += 1
        elif skip is not None:
            skipped += 1
            print(f"skipped: {name}: {skip.get('message')}")
            if not name.startswith(tuple(allowed)):
                unexpected.append(name)
        else:
            passed += 1
    for name in unexpected:
        print(f"not on the list of allowed skips ({allow_list}): {name}")
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed or unexpected or not passed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
