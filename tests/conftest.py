"""Every test starts from the same seeds; hypothesis draws the same examples on every run."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import settings

settings.register_profile("dcut", derandomize=True, deadline=None, max_examples=40)
settings.load_profile("dcut")


@pytest.fixture(autouse=True)
def seed() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
