"""`meshloom.distributed` is `meshloom.ttnn.distributed`: one module under two names, so that there is one matmul.

>>> import meshloom
>>> meshloom.distributed is meshloom.ttnn.distributed
True
"""

from __future__ import annotations

import sys

from meshloom.ttnn import distributed

sys.modules[__name__] = distributed
