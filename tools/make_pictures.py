#!/usr/bin/env python3
"""Draws the pictures of the README and of docs/speed.md from the committed records.

    python3 tools/make_pictures.py           writes docs/pictures/*.svg
    python3 tools/make_pictures.py --check   fails where one is not what the records make
"""

import argparse
import sys

from pictures import cpu, formats, h200, records

FOLDER = records.ROOT / "docs/pictures"
PICTURES = {"h200": h200.draw, "cpu": cpu.draw, "formats": formats.draw}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    differing = []
    for name, draw in PICTURES.items():
        file, drawn = FOLDER / f"{name}.svg", draw()
        if options.check:
            if not file.is_file() or file.read_text(encoding="utf-8") != drawn:
                differing.append(file.relative_to(records.ROOT).as_posix())
        else:
            file.write_text(drawn, encoding="utf-8")
    for name in differing:
        print(f"{name} is not what its records make: run tools/make_pictures.py")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
