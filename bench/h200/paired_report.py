#!/usr/bin/env python3
"""Makes tables of what paired_bench.py printed.

    python3 bench/h200/paired_report.py paired.jsonl --markdown bench/results/h200/DATE-paired.md
    python3 bench/h200/paired_report.py paired.jsonl --readme README.md
    python3 bench/h200/paired_report.py paired.jsonl --date DATE --plot docs/h200-speed.svg
    python3 bench/h200/paired_report.py four_bits.jsonl --goals
"""

import argparse
import datetime
import pathlib

from paired import goals, plot, report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+")
    parser.add_argument("--markdown", help="file to write; else the table is printed")
    parser.add_argument("--readme", nargs="?", const="-", metavar="FILE", help="the README's table instead, put between FILE's marks")
    parser.add_argument("--goals", action="store_true", help="print tables of the goals of four-bit layers instead")
    parser.add_argument("--plot", metavar="FILE", help="SVG to write: times over ours against tokens")
    parser.add_argument("--plot-cases", default=",".join(report.README_CELLS))
    parser.add_argument("--plot-peers", default="vllm_triton,deepgemm")
    parser.add_argument("--peer", default="vllm_triton", help="whose ratio the README's table has")
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    parser.add_argument("--command", default="python3 bench/h200/paired_bench.py")
    options = parser.parse_args()
    results = report.read(options.results)
    if options.goals:
        print(goals.tables(results))
    elif options.readme == "-":
        print(report.readme_text(results, options.peer))
    elif options.readme:
        page = pathlib.Path(options.readme)
        text = report.readme_text(results, options.peer)
        page.write_text(report.put_between_marks(page.read_text(encoding="utf-8"), text), encoding="utf-8")
    elif options.plot:
        cases, peers = options.plot_cases.split(","), options.plot_peers.split(",")
        pathlib.Path(options.plot).write_text(plot.svg(results, options.date, cases, peers), encoding="utf-8")
    elif options.markdown:
        pathlib.Path(options.markdown).write_text(report.markdown(results, options.date, options.command), encoding="utf-8")
    else:
        print(report.markdown(results, options.date, options.command))


if __name__ == "__main__":
    main()
