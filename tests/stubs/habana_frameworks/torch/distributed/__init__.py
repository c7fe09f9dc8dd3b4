# SPDX-License-Identifier: Apache-2.0
"""Package of the collectives' backend."""
