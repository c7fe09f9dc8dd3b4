# SPDX-License-Identifier: Apache-2.0
"""The device's random generator; here torch's own, which the stub's tensors use."""

import torch

from habana_frameworks.calls import note


def manual_seed(seed: int) -> None:
    note("manual_seed", seed=seed)
    torch.default_generator.manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    note("manual_seed_all", seed=seed)
    torch.default_generator.manual_seed(seed)
