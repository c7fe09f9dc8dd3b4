# SPDX-License-Identifier: Apache-2.0
"""Package of the bridge's configuration."""
