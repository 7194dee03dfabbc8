"""Two test processes share two cores: one thread each is faster than two."""

import torch

torch.set_num_threads(1)
