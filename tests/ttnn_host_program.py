"""What a rank of `test_ttnn_processes` runs on one of two hosts: some programs, whose results go to a file."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

import torch

import ttnn_rank_cases

if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, *names = sys.argv[1:]
    found = ttnn_rank_cases.run([*names, "scopes"])
    (Path(folder) / f"found-{os.environ['RANK']}").write_bytes(pickle.dumps(found))
