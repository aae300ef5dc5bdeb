#!/usr/bin/env python3
"""Merges what layer_bench and peers.py printed into a table against the hardware's floor, and a plot.

    layer_bench > ours.jsonl; python3 bench/h200/peers.py > beside.jsonl
    python3 bench/h200/report.py ours.jsonl beside.jsonl --markdown bench/results/h200/2026-11-20-speed.md

Where layer_bench measured a cell in several runs the run of median time counts. Other engines are compared by
paired_bench.py alone, in one process: their times of another hour or machine differ from ours by up to 30 %.
"""

import argparse
import datetime
import json
import pathlib
import subprocess

HERE = pathlib.Path(__file__).resolve().parent
READ_BYTES_PER_US = 4.8e6
PEAK_FLOPS_PER_US = {"bf16": 989e6, "fp8block": 1979e6}
LEAST_TFLOPS = {"mixtral-8x7b": 620, "olmoe": 620, "qwen3-235b": 590, "qwen3-235b-fp8": 1000, "dsv3-ep8-fp8": 1000}
D2_LIMIT = 1.10
ZIPF_LIMIT = 1.15
ROUTING_US = 6.0
TOLERANCE = 6e-3


def read_lines(paths: list) -> tuple[dict, dict, dict]:
    """Facts of the machine, our cells by (case, tokens, variant), measured peers by (case, tokens)."""
    machine, runs, peers = {}, {}, {}
    for path in paths:
        for line in pathlib.Path(path).read_text(encoding="utf-8").splitlines():
            if not line.startswith("{"):
                continue
            row = json.loads(line)
            if "variant" in row:
                runs.setdefault((row["case"], row["tokens"], row["variant"]), []).append(row)
            elif "peer" in row:
                peers.setdefault((row["case"], row["tokens"]), {})[row["peer"]] = row["us"]
            else:
                for key, value in row.items():
                    machine[key] = max(machine.get(key, value), value)
    return machine, {cell: run_that_counts(rows) for cell, rows in runs.items()}, peers


def run_that_counts(rows: list) -> dict:
    """The run of median time, with the worst of what any run found wrong."""
    if "us" not in rows[0]:
        return rows[0]
    ordered = sorted(rows, key=lambda r: r["us"])
    row = dict(ordered[len(rows) // 2], runs=len(rows), least=ordered[0]["us"], most=ordered[-1]["us"])
    for fault in ("worst_error", "stray", "damage"):
        if fault in row:
            row[fault] = max(r[fault] for r in rows)
    if "right" in row:
        row["right"] = all(r["right"] for r in rows)
    return row


def floor_us(cell: dict) -> float:
    return max(cell["active_bytes"] / READ_BYTES_PER_US, cell["flops"] / PEAK_FLOPS_PER_US[cell["format"]])


def is_wrong(cell: dict) -> bool:
    """Of fp8, layer_bench itself tells a flipped code of an activation from a fault; it then exits with 1."""
    exceeds = cell["format"] == "bf16" and cell["worst_error"] > TOLERANCE
    return exceeds or cell["stray"] != 0 or cell["damage"] != 0


class Report:
    def __init__(self, machine: dict, ours: dict, measured: dict):
        self.machine, self.ours, self.measured = machine, ours, measured
        self.cases = list(dict.fromkeys(case for case, _, _ in ours))

    def variant(self, cell: dict, name: str) -> str:
        other = self.ours.get((cell["case"], cell["tokens"], name))
        if other is None or other.get("refused"):
            return "-"
        if name == "zipf":
            return f"{other['us']:.1f} ({floor_us(other) / other['us']:.2f})"
        if name == "d2":
            return f"{other['us']:.1f} (x{other['us'] / cell['us']:.2f})"
        return f"{other['us']:.1f} ({other['us'] - cell['us']:+.1f})"

    def row(self, cell: dict) -> str:
        peers = self.measured.get((cell["case"], cell["tokens"]), {})
        peer_columns = [f"{peers[n]:.0f}" if n in peers else "-" for n in ("cublas", "grouped_mm")]
        wrong = " WRONG" if is_wrong(cell) else ""
        columns = [
            str(cell["tokens"]),
            str(cell["active_experts"]),
            f"{cell['us']:.1f}",
            f"{floor_us(cell) / cell['us']:.2f}",
            f"{cell['active_bytes'] / cell['us'] * 1e-6:.2f}",
            f"{cell['flops'] / cell['us'] * 1e-6:.0f}",
            *peer_columns,
            self.variant(cell, "d2"),
            self.variant(cell, "logits"),
            self.variant(cell, "zipf"),
            f"{cell['worst_error']:.1e}{wrong}",
            cell["kernel"],
        ]
        return "| " + " | ".join(columns) + " |"

    def cells(self, case: str) -> list:
        return [c for (name, _, v), c in self.ours.items() if name == case and v == "d1" and "us" in c]

    def case_table(self, case: str) -> list[str]:
        head = "| T | active | ours | of floor | TB/s | TFLOP/s | cuBLAS | grouped_mm | D2 | from logits | Zipf | worst error | kernel |"
        rule = "|" + "---:|" * 12 + "---|"
        return [f"## {case}", "", head, rule, *(self.row(c) for c in self.cells(case)), ""]

    def rate_lines(self) -> list[str]:
        lines = []
        for case, least in LEAST_TFLOPS.items():
            cell = self.ours.get((case, 16384, "d1"))
            if cell and "us" in cell:
                tflops = cell["flops"] / cell["us"] * 1e-6
                state = "met" if tflops >= least else "**not met**"
                lines.append(f"- {case}, T = 16384: {tflops:.0f} TFLOP/s (goal {least}): {state}")
        return lines

    def d2_line(self) -> list[str]:
        ratios = []
        for (case, tokens, variant), cell in self.ours.items():
            base = self.ours.get((case, tokens, "d1"))
            if variant == "d2" and tokens >= 16 and "us" in cell and base and "us" in base:
                ratios.append((cell["us"] / base["us"], case, tokens))
        if not ratios:
            return []
        worst, above = max(ratios), sum(r[0] > D2_LIMIT for r in ratios)
        return [f"- D2 from T = 16: at most x{worst[0]:.2f} ({worst[1]}, T = {worst[2]}); {above} of {len(ratios)} cells above x{D2_LIMIT:.2f}"]

    def routing_lines(self) -> list[str]:
        cells = {(c["case"], c["tokens"]): c for c in self.ours.values() if c["variant"] == "routing"}
        if not cells:
            return []
        tokens = sorted({t for _, t in cells})
        lines = ["## Routing alone", "", f"Logits to ids, weights and permutation, microseconds; goal {ROUTING_US:.0f}.", ""]
        lines += ["| case | " + " | ".join(f"T = {t}" for t in tokens) + " |", "|---|" + "---:|" * len(tokens)]
        for case in dict.fromkeys(name for name, _ in cells):
            row = [cells.get((case, t)) for t in tokens]
            texts = ["-" if c is None else f"{c['us']:.1f}" + ("" if c["right"] else " WRONG") for c in row]
            lines.append(f"| {case} | " + " | ".join(texts) + " |")
        return [*lines, ""]

    def zipf_line(self) -> list[str]:
        """How much less of its own floor a skewed batch reaches than an even one."""
        ratios = [((zipf["us"] / floor_us(zipf)) / (cell["us"] / floor_us(cell)), case, tokens)
                  for (case, tokens, variant), cell in self.ours.items()
                  if variant == "d1" and "us" in (zipf := self.ours.get((case, tokens, "zipf"), {}))]
        if not ratios:
            return []
        worst, case, tokens = max(ratios)
        above = sum(ratio > ZIPF_LIMIT for ratio, _, _ in ratios)
        return [f"- Zipf(1.0) over its floor against uniform choices over theirs: at most x{worst:.2f} ({case}, T = {tokens}); "
                f"{above} of {len(ratios)} cells above x{ZIPF_LIMIT:.2f}"]

    def runs_lines(self) -> list[str]:
        """Of how many runs the times are the median, and how far those lie apart."""
        cells = [cell for cell in self.ours.values() if cell.get("runs", 1) > 1 and cell["variant"] == "d1"]
        if not cells:
            return []
        few, many = [max((c["most"] / c["least"] - 1) * 100 for c in cells if (c["tokens"] >= 4096) == large)
                     for large in (False, True)]
        return [f"Times are the median of {cells[0]['runs']} runs of layer_bench; runs of a cell differ by up to "
                f"{few:.0f} % below 4096 tokens and {many:.0f} % from there on, where power limits the clock.", ""]

    def markdown(self, command: str, commit: str) -> str:
        tables = [line for case in self.cases for line in self.case_table(case)]
        facts = ", ".join(f"{key} {value}" for key, value in sorted(self.machine.items()))
        lines = [
            f"# Whole layer on the GPU, {datetime.date.today().isoformat()}",
            "",
            f"Machine: {facts}. Commit {commit}. Command: `{command}`.",
            "",
            "Microseconds from ids and weights to the output, median over replays of a CUDA graph of 8 (T <= 64),",
            "3 (T <= 1024) or 1 forwards, each routed differently; one plan for up to 16384 tokens; every output",
            "checked against float64 after timing. The floor is the larger of active weight bytes / 4.8 TB/s and",
            "FLOPs / peak (989, in fp8 1979 TFLOP/s). cuBLAS (two dense products of the same FLOPs, no experts) and",
            "torch's grouped_mm (two products of sorted rows) ran in another process, soon before or after; paired_bench.py",
            "compares engines. Zipf: in brackets the share of its own floor. Errors are relative, of the worst token; those",
            "of fp8 hold codes of the intermediate that lie between two values (docs/quantisation.md), beyond which 6e-3 holds.",
            "",
            *self.runs_lines(),
            *self.rate_lines(),
            *self.d2_line(),
            *self.zipf_line(),
        ]
        return "\n".join([*lines, "", *tables, *self.routing_lines()]).rstrip() + "\n"

    def plot(self, path: pathlib.Path) -> None:
        import matplotlib

        matplotlib.use("Agg")
        matplotlib.rcParams["svg.hashsalt"] = "conclave"
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(8, 4.8))
        for case in self.cases:
            cells = self.cells(case)
            if cells:
                style = "-" if cells[0]["format"] == "bf16" else "--"
                axes.plot([c["tokens"] for c in cells], [c["us"] / floor_us(c) for c in cells], style, marker="o", markersize=3, label=case)
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_xscale("log", base=4)
        axes.set_xticks(sorted({tokens for _, tokens, _ in self.ours}), minor=False)
        axes.get_xaxis().set_major_formatter(matplotlib.ticker.ScalarFormatter())
        axes.set_xlabel("tokens")
        axes.set_ylabel("time over the hardware's floor")
        axes.set_ylim(bottom=0.9)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, ncol=2)
        figure.tight_layout()
        figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lines", nargs="+", help="what layer_bench and peers.py printed")
    parser.add_argument("--markdown", type=pathlib.Path, help="default: standard output")
    parser.add_argument("--plot", type=pathlib.Path, help="an SVG file")
    parser.add_argument("--command", default="layer_bench", help="how layer_bench was run")
    parser.add_argument("--commit", help="default: that of this working tree")
    options = parser.parse_args()
    commit = options.commit or subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=HERE, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    report = Report(*read_lines(options.lines))
    text = report.markdown(options.command, commit)
    if options.markdown:
        options.markdown.parent.mkdir(parents=True, exist_ok=True)
        options.markdown.write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    if options.plot:
        report.plot(options.plot)


if __name__ == "__main__":
    main()
