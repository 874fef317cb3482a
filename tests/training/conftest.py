"""One thread: on tiny tensors a pool of threads costs ten times what it saves."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
