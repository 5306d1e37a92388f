"""Puts the sources on the path, and runs Triton kernels through its interpreter where there is no GPU (set before triton is imported)."""
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

torch.set_num_threads(1)  # the models of these tests are tiny: more threads only wait for each other

import pytest  # noqa: E402


@pytest.fixture
def real_model():
    """The folder of a real checkpoint (SmolLM2-135M-Instruct), named by NANOROLL_REAL_MODEL."""
    path = os.environ.get("NANOROLL_REAL_MODEL")
    if not path:
        pytest.skip("NANOROLL_REAL_MODEL does not name a checkpoint")
    return path
