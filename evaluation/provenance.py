"""What every results file says of itself: how it was made, when, and on what."""

import datetime
import importlib.metadata
import os
import platform
import re
import shlex
import sys
from pathlib import Path
from typing import Any


def provenance(*packages: str) -> dict[str, Any]:
    """``command``, ``date`` (UTC), ``machine`` (cpu, cores) and ``versions`` (Python's and the packages')."""
    cpuinfo = Path("/proc/cpuinfo").read_text(errors="replace") if Path("/proc/cpuinfo").exists() else ""
    cpu = re.search(r"^model name\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    return {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": {"cpu": cpu[1] if cpu else platform.machine(), "cores": os.cpu_count()},
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in packages},
        },
    }
