"""Two short fine-tunes through the command line, and what they changed, as one table and one picture."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ctxext.checkpoints import read_log
from ctxext.plotting import plot_finetunes

CONFIG = "configs/finetune/pose-smollm2.yaml"
# YaRN reads on without training; a few steps at its authors' learning rate are enough to see that they do no harm.
RUNS = {"PI x2": (), "YaRN x2": ("-s", "method.name=yarn", "-s", "finetune.learning_rate=2e-5", "--steps", "3")}
TRAINED = 8192


def main(
    output: Annotated[Path, typer.Option(help="Folder for the runs, table and picture.")] = Path("results/finetune"),
) -> None:
    """Fine-tune (or go on where it was interrupted), then write what the logs say."""
    started, logs = time.monotonic(), {}
    for title, settings in RUNS.items():
        folder = output / title.split()[0].lower()
        command = ["finetune", "--config", CONFIG, *settings, "--output", str(folder), "--resume"]
        Console(stderr=True).print(f"ctxext {' '.join(command)}", highlight=False)
        subprocess.run([sys.executable, "-m", "ctxext", *command], check=True)
        logs[title] = read_log(folder)
    table = _table(logs)
    (output / "table.md").write_text(table, encoding="utf-8")
    plot_finetunes(logs, TRAINED, output / "finetune.png")
    typer.echo(table)
    typer.echo(
        f"wrote {output / 'table.md'} and {output / 'finetune.png'}, in {(time.monotonic() - started) / 60:.0f} minutes"
    )


def _table(logs: dict[str, list[dict[str, Any]]]) -> str:
    first = next(iter(logs.values()))[0]["evaluation"]
    lengths = [row["length"] for row in first]
    lines = [
        "| perplexity | steps, tokens | " + " | ".join(f"to {length:,}" for length in lengths) + " |",
        "|---|---|" + "---|" * len(lengths),
    ]
    for title, log in logs.items():
        evaluations = [entry for entry in log if "evaluation" in entry]
        tokens = {entry["step"]: entry["tokens"] for entry in log if "loss" in entry}
        for entry in (evaluations[0], evaluations[-1]):
            done = f"{entry['step']}, {tokens[entry['step']]:,}" if entry["step"] else "none"
            cells = " | ".join(f"{row['perplexity']:.2f}" for row in entry["evaluation"])
            lines.append(f"| {title} | {done} | {cells} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    typer.run(main)
