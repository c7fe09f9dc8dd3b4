# SPDX-License-Identifier: Apache-2.0
"""The mode switch. Read when the module is imported, as the bridge does: a later change has no effect."""

from habana_frameworks.calls import ENVIRONMENT_AT_IMPORT

_LAZY = ENVIRONMENT_AT_IMPORT.get("PT_HPU_LAZY_MODE", "0") == "1"


def is_lazy() -> bool:
    return _LAZY
