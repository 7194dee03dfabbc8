"""Weights and training states in files: any mesh reads what any mesh wrote.

saving.py        `save`: a state into a folder, by all processes together, in a thread if asked
loading.py       `load`: a checkpoint into a state that is there
exporting.py     `export` and `verify`: weights for others, every byte compared
weights.py       `open_weights`: files of weights, read by slices
folders.py       written aside, put in place in one step, numbered: `latest`
state.py         a state as a tree of plain values and tensors by name
values.py        plain values as JSON and back
random_state.py  `RandomState`
pieces.py        who writes which piece
index.py         what a checkpoint says of itself
files.py         safetensors with checksums, read by boxes
arrays.py        arrays as bytes
formats.py       dtypes as safetensors spells them
staging.py       `CopyStager`: copies for torch.distributed.checkpoint.async_save
progress.py      a bar
"""

from meshloom.checkpoint.exporting import export, verify
from meshloom.checkpoint.folders import latest
from meshloom.checkpoint.loading import load
from meshloom.checkpoint.random_state import RandomState
from meshloom.checkpoint.saving import Saving, save
from meshloom.checkpoint.staging import CopyStager
from meshloom.checkpoint.weights import Weights, open_weights

__all__ = [
    "CopyStager",
    "RandomState",
    "Saving",
    "Weights",
    "export",
    "latest",
    "load",
    "open_weights",
    "save",
    "verify",
]
