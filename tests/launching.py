"""Starts jobs on several ranks of the CPU (gloo), by accelerate launch as a user would, and reads what they report.

A job is a script beside the tests that start it; its first argument is the folder in which each rank reports.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 180
ENVIRONMENT = {
    **os.environ,
    "ACCELERATE_USE_CPU": "true",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "tests"))),
    "CUDA_VISIBLE_DEVICES": "",
}


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def command(job, *arguments, processes=2):
    """What starts a job."""
    words = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"]
    words += ["--num_processes", str(processes), "--main_process_port", str(free_port()), "--num_machines", "1"]
    words += ["--mixed_precision", "no", "--dynamo_backend", "no", str(job)]
    return [*words, *map(str, arguments)]


def launch(job, *arguments, processes=2, **environment):
    """Run a job; returns the completed process."""
    return subprocess.run(
        command(job, *arguments, processes=processes),
        cwd=ROOT,
        env={**ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def results(out, name, processes=2):
    """What all processes reported; checks that there were so many that knew each other."""
    reports = [json.loads((out / f"{name}-{rank}.json").read_text()) for rank in range(processes)]
    assert [(report["rank"], report["world"]) for report in reports] == [(i, processes) for i in range(processes)]
    return reports
