"""What all tests share.

Two test processes share two cores: one thread each is faster than two. Properties draw the same cases every time, so
that a run can be repeated; a long run (`MESHLOOM_CASES`) draws new ones.
"""

import os

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("same", derandomize=True, deadline=None, database=None)
settings.register_profile("new", deadline=None, database=None, print_blob=True)
settings.load_profile("new" if os.environ.get("MESHLOOM_CASES") else "same")
