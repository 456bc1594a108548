"""HDF5 cannot close what it cannot write, and ends the process later if it may: here it may not."""

import subprocess
import sys
from pathlib import Path


def test_a_file_that_cannot_be_written_ends_no_process(request):
    command = [sys.executable, Path(__file__).with_name("closed.py"), str(request.config.option.seed), "60"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    assert not done.stdout
